"""The calls of transformers' attention interface inside a forward, with every argument that they pass."""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from .base import Argument, InterfaceCall
from .flow import Bound, Flow
from .freshness import running_names
from .members import MISSING, Unknown, read
from .source import ForwardSource

POSITIONAL = ("module", "query", "key", "value", "attention_mask", "scaling", "dropout")
"""The interface's own parameters by place. After the mask, the functions of transformers differ in their order."""

_LOOPS = (ast.For, ast.AsyncFor, ast.While, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_ADDS = {"update", "setdefault"}


@dataclass(frozen=True)
class Calls:
    """What a forward does with the interface; `doubts` are the reasons why some of it cannot be seen."""

    calls: tuple[InterfaceCall, ...]
    doubts: tuple[str, ...]


def mentions_interface(function: FunctionType) -> bool:
    """Whether the running code can look up the interface: told from its bytecode, so that no source is needed."""
    kind = _interface_class()
    if kind is None:
        return False
    names = running_names(function.__code__)
    if names & {"AttentionInterface", "ALL_ATTENTION_FUNCTIONS"}:
        return True
    return any(_is_table(found, kind) for name in names if (found := _outer(function, name)) is not MISSING)


def find_calls(source: ForwardSource, function: FunctionType, flow: Flow) -> Calls:
    """Every call of the interface in the forward, in the order of the file."""
    return _Finder(source, function, flow).run()


def _interface_class() -> type | None:
    module = sys.modules.get("transformers.modeling_utils")
    found = vars(module).get("AttentionInterface") if module else None
    return found if isinstance(found, type) else None


def _is_table(found: Any, kind: type) -> bool:
    return found is kind or isinstance(found, kind) or found is vars(kind).get("_global_mapping", MISSING)


def _outer(function: FunctionType, name: str) -> Any:
    code = function.__code__
    if name in code.co_freevars:
        try:
            return (function.__closure__ or ())[code.co_freevars.index(name)].cell_contents
        except ValueError:
            return MISSING
    return function.__globals__.get(name, MISSING)


class _Finder:
    def __init__(self, source: ForwardSource, function: FunctionType, flow: Flow) -> None:
        self._source, self._function, self._flow = source, function, flow
        self._kind = _interface_class()
        self._doubts: list[str] = []
        self._imports = [node for node in flow.nodes if isinstance(node, ast.ImportFrom)]
        self._names: frozenset[str] = frozenset()
        self._tables: frozenset[str] = frozenset()

    def run(self) -> Calls:
        if self._kind is None:
            return Calls((), ())
        self._tables = self._spread_over_locals("_tables", self._is_table)
        self._names = self._spread_over_locals("_names", self._is_interface)
        calls = []
        for node in self._flow.nodes:
            if isinstance(node, ast.expr) and self._is_interface(node):
                call = self._use(node)
                calls.extend([call] if call else [])
        calls.sort(key=lambda call: call.line)
        return Calls(tuple(calls), tuple(dict.fromkeys(self._doubts)))

    def _spread_over_locals(self, field: str, holds: Callable[[ast.expr], bool]) -> frozenset[str]:
        """The locals for which `holds` is true after any of their assignments, also by way of other locals."""
        names = {n.id for n in self._flow.nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        found: frozenset[str] = frozenset()
        while True:
            setattr(self, field, found)
            more = {name for name in names if any(map(holds, self._flow.bindings(name)))}
            if more <= found:
                return found
            found = found | more

    def _is_table(self, node: ast.expr) -> bool:
        if isinstance(node, ast.Name):
            if node.id in self._tables or self._imported(node.id):
                return True
            return not self._flow.bindings(node.id) and _is_table(_outer(self._function, node.id), self._require())
        if isinstance(node, ast.Call):
            return self._live(node.func) is self._kind
        if isinstance(node, ast.Attribute):
            found = self._live(node)
            return found is not MISSING and _is_table(found, self._require())
        return False

    def _require(self) -> type:
        assert self._kind is not None
        return self._kind

    def _imported(self, name: str) -> bool:
        for node in self._imports:
            if node.module and not node.level:
                for alias in node.names:
                    module = sys.modules.get(node.module)
                    if (alias.asname or alias.name) == name and module is not None:
                        return _is_table(vars(module).get(alias.name, MISSING), self._require())
        return False

    def _live(self, node: ast.expr) -> Any:
        """The live object behind a dotted global name, or MISSING."""
        if isinstance(node, ast.Name):
            return MISSING if self._flow.bindings(node.id) else _outer(self._function, node.id)
        if isinstance(node, ast.Attribute):
            owner = self._live(node.value)
            try:
                return MISSING if owner is MISSING else read(owner, node.attr)
            except Unknown:
                return MISSING
        return MISSING

    def _is_interface(self, node: ast.expr) -> bool:
        """Whether the expression is one of the interface's functions (on some path)."""
        if isinstance(node, ast.Name):
            return isinstance(node.ctx, ast.Load) and node.id in self._names
        if isinstance(node, ast.IfExp):
            return self._is_interface(node.body) or self._is_interface(node.orelse)
        if isinstance(node, ast.BoolOp):
            return any(map(self._is_interface, node.values))
        if isinstance(node, ast.NamedExpr):
            return self._is_interface(node.value)
        if isinstance(node, ast.Subscript):
            return self._is_table(node.value)
        if not isinstance(node, ast.Call):
            return False
        if isinstance(node.func, ast.Attribute) and node.func.attr in ("get_interface", "get"):
            return self._is_table(node.func.value)
        return self._is_partial(node)

    def _is_partial(self, node: ast.expr) -> bool:
        if not isinstance(node, ast.Call) or self._live(node.func) is not functools.partial:
            return False
        return bool(node.args) and self._is_interface(node.args[0])

    def _use(self, node: ast.expr) -> InterfaceCall | None:
        """The call that `node` is the function of; None where it only moves to a place that is looked at too."""
        parent = self._flow.parent(node)
        if isinstance(parent, ast.Call):
            if parent.func is node:
                return self._call(parent, node)
            if self._is_partial(parent) and parent.args[0] is node:
                return None
        if isinstance(parent, (ast.IfExp, ast.BoolOp, ast.NamedExpr, ast.Compare, ast.Attribute, ast.Expr)):
            return None
        if isinstance(parent, (ast.Assign, ast.AnnAssign, ast.Tuple)) and self._lands_in_a_local(node, parent):
            return None
        self._doubts.append(f"it hands the interface on where its call cannot be seen: {self._line(parent)}")
        return None

    def _lands_in_a_local(self, node: ast.expr, parent: ast.AST) -> bool:
        statement = parent if isinstance(parent, ast.stmt) else self._flow.parent(parent)
        if not isinstance(statement, (ast.Assign, ast.AnnAssign)):
            return False
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        names = {n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)}
        bound = any(node in self._flow.bindings(name) for name in names)
        return bound and not any(isinstance(t, (ast.Attribute, ast.Subscript)) for t in targets)

    def _line(self, node: ast.AST | None) -> str:
        return ast.unparse(node).partition("\n")[0] if node is not None else "?"

    def _call(self, call: ast.Call, function: ast.expr) -> InterfaceCall:
        arguments: list[Argument] = []
        places: list[ast.expr] = []
        forwards = False
        for layer in [*self._partials(function), call]:
            values = layer.args[1:] if layer is not call else layer.args
            places.extend(self._positional(values))
            for keyword in layer.keywords:
                if keyword.arg is None:
                    forwards |= self._spread(keyword.value, arguments)
                else:
                    arguments = [a for a in arguments if layer is call or a.name != keyword.arg]
                    arguments.append(_argument(keyword.arg, keyword.value))
        named = [_argument(_place(i), node, positional=True) for i, node in enumerate(places)]
        looped = any(isinstance(outer, _LOOPS) for outer in self._flow.ancestors(call))
        return InterfaceCall(self._source.file, call.lineno, tuple(named + arguments), forwards, looped)

    def _partials(self, function: ast.expr) -> list[ast.Call]:
        """The partial applications around the interface's function, the innermost first."""
        if isinstance(function, ast.Name):
            reach = self._flow.reach(function.id, function)
            if isinstance(reach, Bound):
                return self._partials(reach.expression)
            if any(self._is_partial(bound) for bound in self._flow.bindings(function.id)):
                self._doubts.append(f"{function.id!r} is a partial application on some paths only")
            return []
        if isinstance(function, ast.Call) and self._is_partial(function):
            return [*self._partials(function.args[0]), function]
        inner = [n for n in ast.walk(function) if n is not function and isinstance(n, ast.expr) and self._is_partial(n)]
        if inner:
            self._doubts.append("a partial application is chosen by a condition")
        return []

    def _positional(self, values: list[ast.expr]) -> list[ast.expr]:
        found: list[ast.expr] = []
        for value in values:
            if not isinstance(value, ast.Starred):
                found.append(value)
                continue
            literal = self._literal(value.value)
            if not isinstance(literal, (ast.Tuple, ast.List)):
                self._doubts.append(f"positional arguments are unpacked from {ast.unparse(value.value)!r}")
                return found
            found.extend(self._positional(literal.elts))
        return found

    def _literal(self, node: ast.expr) -> ast.expr:
        """The tuple or dict that a local holds, when it is bound once and only ever spread."""
        if not isinstance(node, ast.Name):
            return node
        reach = self._flow.reach(node.id, node)
        return reach.expression if isinstance(reach, Bound) and not self._touched(node.id) else node

    def _touched(self, name: str) -> bool:
        """Whether a local is used for anything but being spread."""
        uses = [n for n in self._flow.nodes if isinstance(n, ast.Name) and n.id == name]
        return (
            any(
                isinstance(use.ctx, ast.Load) and not isinstance(self._flow.parent(use), (ast.keyword, ast.Starred))
                for use in uses
            )
            or len([use for use in uses if isinstance(use.ctx, ast.Store)]) != 1
        )

    def _spread(self, node: ast.expr, arguments: list[Argument]) -> bool:
        """Add the keywords of a spread dict; True when they are the forward's own keywords, passed on."""
        literal = self._literal(node)
        if isinstance(literal, ast.Dict):
            for key, value in zip(literal.keys, literal.values, strict=True):
                if isinstance(key, ast.Constant) and isinstance(key.value, str):
                    arguments.append(_argument(key.value, value))
                elif key is None:
                    self._spread(value, arguments)
                else:
                    self._doubts.append(f"a keyword's name is computed: {self._line(key)}")
            return False
        if isinstance(literal, ast.Call) and self._builtin_dict(literal):
            for keyword in literal.keywords:
                if keyword.arg is None:
                    self._spread(keyword.value, arguments)
                else:
                    arguments.append(_argument(keyword.arg, keyword.value))
            return False
        if isinstance(node, ast.Name) and node.id in self._flow.parameters:
            self._doubts.extend(self._added(node.id))
            return True
        self._doubts.append(f"keywords are spread from {ast.unparse(node)!r}")
        return False

    def _builtin_dict(self, call: ast.Call) -> bool:
        named = isinstance(call.func, ast.Name) and call.func.id == "dict" and not call.args
        return named and self._live(call.func) is MISSING

    def _added(self, name: str) -> list[str]:
        """The keywords that the forward itself puts among those it passes on."""
        found = []
        for node in self._flow.nodes:
            if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store) and _is_name(node.value, name):
                found.append(f"it puts {ast.unparse(node.slice)} among the keywords it passes on")
            elif self._adds_keywords(node, name):
                found.append(f"it changes the keywords it passes on: {ast.unparse(node)}")
        if self._flow.bindings(name):
            found.append(f"it assigns {name!r}, whose keywords it passes on")
        return found

    def _adds_keywords(self, node: ast.AST, name: str) -> bool:
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            return False
        return node.func.attr in _ADDS and _is_name(node.func.value, name)


def _is_name(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _place(index: int) -> str:
    return POSITIONAL[index] if index < len(POSITIONAL) else f"positional_{index}"


def _argument(name: str, node: ast.expr, positional: bool = False) -> Argument:
    return Argument(name, ast.unparse(node), node, positional)
