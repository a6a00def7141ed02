"""The source of a class's forward as a syntax tree, or the one sentence that says why there is none."""

from __future__ import annotations

import ast
import inspect
import linecache
import tokenize
from dataclasses import dataclass
from types import CodeType, FunctionType

from .errors import SourceError
from .freshness import stale

MAX_SOURCE_BYTES = 1_000_000
MAX_NODES = 100_000
MAX_DEPTH = 200


@dataclass(frozen=True)
class ForwardSource:
    """A function's definition; line numbers in `tree` are those of `file`.

    It holds the code and not the function, whose closure may hold the class: a cache of sources keeps no class alive.
    """

    file: str
    line: int
    tree: ast.FunctionDef
    code: CodeType


def forward_function(cls: type) -> FunctionType:
    """The Python function behind `cls.forward`, inherited or decorated; attributes of instances do not count.

    Raises:
        SourceError: there is no forward, its `__wrapped__` chain is a cycle, or it does not end in a Python function.
    """
    function = inspect.getattr_static(cls, "forward", None)
    seen: set[int] = set()
    while True:
        if id(function) in seen:
            raise SourceError("the forward's __wrapped__ chain is a cycle", where=_name(cls))
        seen.add(id(function))
        inner = getattr(function, "__dict__", {}).get("__wrapped__")
        if inner is None:
            break
        function = inner
    if not isinstance(function, FunctionType):
        raise SourceError(f"forward is {_article(function)}, not a Python function", where=_name(cls))
    return function


def read_forward(cls: type) -> ForwardSource:
    """Read and parse the forward that instances of `cls` run.

    Raises:
        SourceError: the source is missing, unreadable, too large, too deep, or not that of the running code.
    """
    return read_function(forward_function(cls), where=_name(cls))


def read_function(function: FunctionType, where: str) -> ForwardSource:
    """Read and parse one function; `where` names it in errors. Raises SourceError as `read_forward` does."""
    code = function.__code__
    place = f"{where} ({code.co_filename}:{code.co_firstlineno})"
    lines = _lines(function, place)
    block = _block(lines[code.co_firstlineno - 1 :], place)
    tree = _parse(block, code.co_firstlineno, place)
    difference = stale(tree, code)
    if difference:
        raise SourceError(f"the source file is not the code that is running: {difference}", where=place)
    return ForwardSource(code.co_filename, tree.lineno, tree, code)


def _lines(function: FunctionType, place: str) -> list[str]:
    file = function.__code__.co_filename
    linecache.checkcache(file)
    lines = linecache.getlines(file, function.__globals__)
    if not lines:
        raise SourceError("the source file is missing or cannot be read", where=place)
    if sum(map(len, lines)) > MAX_SOURCE_BYTES:
        raise SourceError(f"the source file is larger than {MAX_SOURCE_BYTES} bytes", where=place)
    if len(lines) < function.__code__.co_firstlineno:
        raise SourceError("the source file ends before the running code begins", where=place)
    return lines


def _block(lines: list[str], place: str) -> str:
    try:
        return "".join(inspect.getblock(lines))
    except (SyntaxError, tokenize.TokenError) as error:
        raise SourceError(f"the source cannot be split into tokens: {error}", where=place) from error


def _parse(block: str, first_line: int, place: str) -> ast.FunctionDef:
    # An `if` around an indented block keeps strings intact that a dedent would change.
    indented = block[:1].isspace()
    text = "if True:\n" + block if indented else block
    try:
        module = ast.parse(text)
    except RecursionError as error:
        raise SourceError("the source is nested too deeply for the parser", where=place) from error
    except MemoryError as error:
        raise SourceError("the source is too complex for the parser", where=place) from error
    except UnicodeEncodeError as error:
        raise SourceError("the source holds characters that are no text (lone surrogates)", where=place) from error
    except SyntaxError as error:
        raise SourceError(f"the source does not parse: {error.msg}", where=place) from error
    except ValueError as error:
        raise SourceError(f"the source does not parse: {error}", where=place) from error
    _measure(module, place)
    ast.increment_lineno(module, first_line - 1 - indented)
    return _definition(module, place)


def _measure(module: ast.Module, place: str) -> None:
    level: list[ast.AST] = [module]
    count = depth = 0
    while level:
        count, depth = count + len(level), depth + 1
        if count > MAX_NODES:
            raise SourceError(f"the source has more than {MAX_NODES} syntax nodes", where=place)
        if depth > MAX_DEPTH:
            raise SourceError(f"the source is nested more than {MAX_DEPTH} levels deep", where=place)
        level = [child for node in level for child in ast.iter_child_nodes(node)]


def _definition(module: ast.Module, place: str) -> ast.FunctionDef:
    statement: ast.stmt | None = module.body[0] if module.body else None
    if isinstance(statement, ast.If) and isinstance(statement.test, ast.Constant):
        statement = statement.body[0]
    if not isinstance(statement, ast.FunctionDef):
        raise SourceError("the source at the running code's line is not a def", where=place)
    return statement


def _name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _article(thing: object) -> str:
    return "missing" if thing is None else f"a {type(thing).__name__}"
