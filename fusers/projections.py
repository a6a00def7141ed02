"""Which linear children feed query, key and value of a layer's interface call, and which one takes its output."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

from torch import nn

from .base import ClassFinding
from .errors import SourceError
from .source import forward_function, read_function

_OUTPUT = ":output"
_MAX_DEPTH = 4

Origin = frozenset[str]
"""The linear children (dotted paths below the attention module) whose outputs a value is made of."""
Traced = Origin | tuple[Any, ...]
"""An Origin, or a tuple with one Traced for each entry."""


@dataclass(frozen=True)
class Projections:
    """Dotted paths below the attention module; each tuple in no particular order.

    `through` are the other children with parameters that lie between a projection and the interface call.
    """

    query: tuple[str, ...]
    key: tuple[str, ...]
    value: tuple[str, ...]
    output: tuple[str, ...]
    through: tuple[str, ...]

    @property
    def is_plain(self) -> bool:
        """One linear each for query, key, value and output, all different: heads can be split among ranks."""
        parts = (self.query, self.key, self.value, self.output)
        return all(len(part) == 1 for part in parts) and len(set(parts)) == len(parts)


def find_projections(module: nn.Module, finding: ClassFinding) -> Projections | None:
    """The projections of one attention module, told from its source; None where it has no single interface call.

    Args:
        module: the attention module; on any device, meta included.
        finding: what AttentionFuser found on its class.
    """
    if len(finding.calls) != 1:
        return None
    try:
        function = forward_function(type(module))
        tree = read_function(function, where=finding.where).tree
    except SourceError:
        return None
    trace = _Trace(module, function, finding.calls[0].line)
    trace.run(tree, {})
    if trace.found is None:
        return None
    query, key, value = (tuple(sorted(part)) for part in trace.found)
    return Projections(query, key, value, tuple(sorted(trace.takers)), tuple(sorted(trace.through)))


def _flat(traced: Traced) -> Origin:
    return traced if isinstance(traced, frozenset) else _union(traced)


def _union(parts: Iterable[Traced]) -> Origin:
    return frozenset().union(*map(_flat, parts))


@dataclass
class _Trace:
    """Follows origins through a function's statements in their order; both branches of every condition count."""

    module: nn.Module | None
    function: FunctionType
    line: int = 0
    depth: int = 0
    found: tuple[Origin, Origin, Origin] | None = None
    takers: set[str] = field(default_factory=set)
    through: set[str] = field(default_factory=set)
    returned: list[Traced] = field(default_factory=list)

    def run(self, tree: ast.FunctionDef, names: dict[str, Traced]) -> Traced:
        """What the function returns when its parameters have the origins `names`."""
        self._owner = tree.args.args[0].arg if self.module is not None and tree.args.args else None
        self._block(tree.body, names)
        if len(self.returned) == 1:
            return self.returned[0]
        return _union(self.returned)

    def _block(self, body: list[ast.stmt], names: dict[str, Traced]) -> None:
        for statement in body:
            self._statement(statement, names)

    def _statement(self, node: ast.stmt, names: dict[str, Traced]) -> None:
        if isinstance(node, ast.Assign):
            value = self._value(node.value, names, targets=_places(node.targets[0]))
            for target in node.targets:
                self._bind(target, value, names)
        elif isinstance(node, (ast.AnnAssign, ast.AugAssign)) and node.value is not None:
            before = names.get(node.target.id, frozenset()) if isinstance(node.target, ast.Name) else frozenset()
            value = self._value(node.value, names)
            self._bind(node.target, _union([before, value]) if isinstance(node, ast.AugAssign) else value, names)
        elif isinstance(node, ast.Return):
            self.returned.append(self._value(node.value, names) if node.value is not None else frozenset())
        elif isinstance(node, ast.If):
            self._branches(node, names)
        elif isinstance(node, ast.Expr):
            self._value(node.value, names)
        else:
            self._nested(node, names)

    def _nested(self, node: ast.stmt, names: dict[str, Traced]) -> None:
        """A statement with blocks of its own: each may run or not, and what it leaves behind may reach the next one."""
        if isinstance(node, (ast.For, ast.AsyncFor)):
            self._bind(node.target, _flat(self._value(node.iter, names)), names)
        elif isinstance(node, (ast.With, ast.AsyncWith)):
            for item in node.items:
                value = self._value(item.context_expr, names)
                if item.optional_vars is not None:
                    self._bind(item.optional_vars, value, names)
            self._block(node.body, names)
            return
        elif isinstance(node, ast.While):
            self._value(node.test, names)
        blocks: list[list[ast.stmt]] = [getattr(node, field, []) for field in ("body", "orelse", "finalbody")]
        blocks += [inner.body for field in ("handlers", "cases") for inner in getattr(node, field, [])]
        for block in (*blocks, *blocks):
            after = dict(names)
            self._block(block, after)
            self._merge(names, [names, after])

    def _branches(self, node: ast.If, names: dict[str, Traced]) -> None:
        self._value(node.test, names)
        then, otherwise = dict(names), dict(names)
        self._block(node.body, then)
        self._block(node.orelse, otherwise)
        self._merge(names, [then, otherwise])

    def _merge(self, names: dict[str, Traced], ways: list[dict[str, Traced]]) -> None:
        """Give `names` what any of the ways through a statement may have left behind."""
        for name in set().union(*ways):
            sides = [way[name] for way in ways if name in way]
            names[name] = sides[0] if all(side == sides[0] for side in sides) else _union(sides)

    def _bind(self, target: ast.expr, value: Traced, names: dict[str, Traced]) -> None:
        if isinstance(target, ast.Name):
            names[target.id] = value
        elif isinstance(target, (ast.Tuple, ast.List)):
            entries = value if isinstance(value, tuple) and len(value) == len(target.elts) else None
            for place, entry in enumerate(target.elts):
                self._bind(entry, _flat(value) if entries is None else entries[place], names)

    def _value(self, node: ast.expr, names: dict[str, Traced], targets: int = 1) -> Traced:
        if isinstance(node, ast.Name):
            return names.get(node.id, frozenset())
        if isinstance(node, (ast.Tuple, ast.List)):
            return tuple(self._value(entry, names) for entry in node.elts)
        if isinstance(node, ast.Call):
            return self._call(node, names, targets)
        if isinstance(node, ast.Subscript):
            return self._entry(node, names)
        if isinstance(node, ast.Attribute):
            return self._value(node.value, names)
        if isinstance(node, ast.NamedExpr):
            value = self._value(node.value, names)
            self._bind(node.target, value, names)
            return value
        if isinstance(node, (ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp)):
            names = dict(names)
            for generator in node.generators:
                self._bind(generator.target, _flat(self._value(generator.iter, names)), names)
        return _union(self._value(n, names) for n in ast.iter_child_nodes(node) if isinstance(n, ast.expr))

    def _entry(self, node: ast.Subscript, names: dict[str, Traced]) -> Traced:
        base = self._value(node.value, names)
        index = node.slice.value if isinstance(node.slice, ast.Constant) else None
        if isinstance(base, tuple) and isinstance(index, int) and -len(base) <= index < len(base):
            entry: Traced = base[index]
            return entry
        return _flat(base)

    def _call(self, node: ast.Call, names: dict[str, Traced], targets: int) -> Traced:
        positional, in_order = self._positional(node, names)
        keywords = {k.arg: self._value(k.value, names) for k in node.keywords}
        given = _union([*positional, *keywords.values()])
        if self._is_interface(node):
            named = {k: v for k, v in keywords.items() if k in ("query", "key", "value")}
            three = [_flat(named.get(n, frozenset())) for n in ("query", "key", "value")]
            for place, traced in enumerate(positional[1:4]):
                three[place] = _flat(traced)
            self.found = (three[0], three[1], three[2])
            return (frozenset({_OUTPUT}), frozenset())
        path = self._child_path(node.func)
        if path is not None and self.module is not None:
            return self._child(path, given)
        if isinstance(node.func, ast.Name):
            return self._function_call(node.func.id, positional, keywords, given) if in_order else given
        receiver = self._value(node.func, names)
        if isinstance(node.func, ast.Attribute) and node.func.attr == "update" and targets == 2 and len(positional) > 1:
            # The interface of every cache: update(key, value, ...) -> (key, value).
            return (positional[0], positional[1])
        return _union([receiver, given])

    def _positional(self, node: ast.Call, names: dict[str, Traced]) -> tuple[list[Traced], bool]:
        """The positional arguments, and whether each stands in its place: a starred one may be any number of them."""
        found: list[Traced] = []
        in_order = True
        for argument in node.args:
            if not isinstance(argument, ast.Starred):
                found.append(self._value(argument, names))
                continue
            value = self._value(argument.value, names)
            in_order = in_order and isinstance(value, tuple)
            found += value if isinstance(value, tuple) else (value,)
        return found, in_order

    def _is_interface(self, node: ast.Call) -> bool:
        first = node.args[0] if node.args else None
        return self.module is not None and node.lineno == self.line and _named(first) == self._owner

    def _child_path(self, node: ast.expr) -> str | None:
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        return ".".join(reversed(parts)) if parts and self._owner and _named(node) == self._owner else None

    def _child(self, path: str, given: Origin) -> Traced:
        assert self.module is not None
        try:
            child = self.module.get_submodule(path)
        except AttributeError:
            return given  # a method of the module itself
        if any(isinstance(inner, nn.Linear) for inner in child.modules()):
            if _OUTPUT in given:
                self.takers.add(path)
            return frozenset({path})
        if given and any(True for _ in child.parameters()):
            self.through.add(path)
        return given

    def _function_call(
        self, name: str, positional: list[Traced], keywords: dict[str | None, Traced], given: Origin
    ) -> Traced:
        function = _plain_function(self.function.__globals__.get(name), name)
        if self.depth >= _MAX_DEPTH or function is None:
            return given
        try:
            tree = read_function(function, where=name).tree
        except SourceError:
            return given
        parameters = [*tree.args.posonlyargs, *tree.args.args, *tree.args.kwonlyargs]
        names = {p.arg: traced for p, traced in zip(parameters, positional, strict=False)}
        names |= {p.arg: keywords[p.arg] for p in parameters if p.arg in keywords}
        result = _Trace(None, function, depth=self.depth + 1).run(tree, names)
        # A nested function or a starred parameter may hide an origin: then all that is given counts.
        return result if _flat(result) == given else given


def _plain_function(value: Any, name: str) -> FunctionType | None:
    """The Python function `name` behind a global: itself, undecorated, or held by the module that stands for it.

    The kernels package replaces a function by a module whose forward closes over it.
    """
    value = inspect.unwrap(value) if callable(value) else value
    if isinstance(value, nn.Module):
        forward = inspect.getattr_static(type(value), "forward", None)
        held = inspect.getclosurevars(forward).nonlocals.values() if isinstance(forward, FunctionType) else ()
        named = [f for f in held if isinstance(f, FunctionType) and f.__name__ == name]
        value = named[0] if len(named) == 1 else None
    return value if isinstance(value, FunctionType) else None


def _named(node: ast.expr | None) -> str | None:
    return node.id if isinstance(node, ast.Name) else None


def _places(target: ast.expr) -> int:
    return len(target.elts) if isinstance(target, (ast.Tuple, ast.List)) else 1
