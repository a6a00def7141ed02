"""Whether a syntax tree is the source of a code object, told from names and numbers without compiling anything."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from types import CodeType

from .flow import leaves


def stale(tree: ast.FunctionDef, code: CodeType) -> str | None:
    """The first difference between the source and the running code, or None when there is none that shows cheaply.

    Compares the function's name, its arguments, the names that it reads and the floats that it holds. Reordered
    statements and changed operators do not show.
    """
    if tree.name != code.co_name:
        return f"it defines {tree.name!r} where {code.co_name!r} runs"
    if _arguments(tree.args) != _running_arguments(code):
        return "the arguments differ"
    written, running = set(_names(tree)), set(_running_names(code))
    for name in sorted(running - written - _implicit(running)):
        return f"it does not mention {name!r}"
    for name in sorted(set(_attributes(tree)) - running):
        return f"{name!r} is not in the running code"
    for number in sorted(set(_floats(tree)) - set(_running_floats(code))):
        return f"{number!r} is not in the running code"
    return None


def _arguments(arguments: ast.arguments) -> list[str]:
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    starred = [a for a in (arguments.vararg, arguments.kwarg) if a is not None]
    return [a.arg for a in [*named, *starred]]


def _running_arguments(code: CodeType) -> list[str]:
    starred = bool(code.co_flags & 0x04) + bool(code.co_flags & 0x08)
    return list(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + starred])


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)


def _running_names(code: CodeType) -> Iterator[str]:
    for inner in _nested(code):
        yield from inner.co_names


def running_names(code: CodeType) -> set[str]:
    """Every global, attribute and closure name that the code and the functions inside it use."""
    return set(_running_names(code)).union(code.co_freevars)


def _implicit(running: set[str]) -> set[str]:
    mangled = {name for name in running if name.startswith("_") and "__" in name[1:]}
    return mangled | {name for name in running if "." in name} | {"AssertionError", "super", "__class__"}


def _names(tree: ast.FunctionDef) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.alias):
            yield from (node.name, *node.name.split("."))
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""
        elif isinstance(node, ast.ClassDef):
            yield from ("__name__", "__module__", "__qualname__")
        elif isinstance(node, ast.MatchClass):
            yield from node.kwd_attrs


def _compiled(tree: ast.FunctionDef) -> Iterator[ast.AST]:
    """The nodes sure to leave a trace in the bytecode: no annotations, defaults, assertions, constant branches."""
    stack: list[ast.AST] = _reachable(tree.body)
    while stack:
        node = stack.pop()
        if isinstance(node, ast.Assert) or (isinstance(node, ast.If) and isinstance(node.test, ast.Constant)):
            continue
        yield node
        if isinstance(node, ast.AnnAssign):
            stack.extend(child for child in (node.target, node.value) if child is not None)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            stack.extend(_reachable(node.body))
        else:
            stack.extend(_children(node))


def _children(node: ast.AST) -> Iterator[ast.AST]:
    for _, field in ast.iter_fields(node):
        if isinstance(field, ast.AST):
            yield field
        elif isinstance(field, list):
            yield from _reachable([entry for entry in field if isinstance(entry, ast.AST)])


def _reachable(block: Sequence[ast.AST]) -> list[ast.AST]:
    """The nodes of a block up to one after which the compiler drops the rest."""
    for i, node in enumerate(block):
        if isinstance(node, ast.stmt) and leaves([node]):
            return [*block[: i + 1]]
    return [*block]


def _attributes(tree: ast.FunctionDef) -> Iterator[str]:
    for node in _compiled(tree):
        if isinstance(node, ast.Attribute) and not node.attr.startswith("__"):
            yield node.attr


def _floats(tree: ast.FunctionDef) -> Iterator[float]:
    """Floats that the compiler cannot have folded into another constant."""
    folded: set[int] = set()
    for node in _compiled(tree):
        if isinstance(node, ast.BinOp):
            folded.update(id(leaf) for side in (node.left, node.right) for leaf in ast.walk(side))
        elif isinstance(node, ast.Constant) and type(node.value) is float and id(node) not in folded:
            yield abs(node.value)


def _running_floats(code: CodeType) -> Iterator[float]:
    stack = [constant for inner in _nested(code) for constant in inner.co_consts]
    while stack:
        constant = stack.pop()
        if isinstance(constant, (tuple, frozenset)):
            stack.extend(constant)
        elif type(constant) is float:
            yield abs(constant)
