"""Which binding of a local name reaches a place in a function, told from the shape of the code alone."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

Block = list[ast.stmt]
Definition = ast.FunctionDef | ast.AsyncFunctionDef

_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_LEAVING = (ast.Return, ast.Raise, ast.Continue, ast.Break)


@dataclass(frozen=True)
class Bound:
    """The name holds the value of `expression`, evaluated at that place."""

    expression: ast.expr


@dataclass(frozen=True)
class Augmented:
    """The name holds its earlier value changed by `statement`."""

    statement: ast.AugAssign


@dataclass(frozen=True)
class Choice:
    """The name holds what reaches the end of one of two branches; None stands for a branch that does not arrive."""

    test: ast.expr
    then: Reach | None
    otherwise: Reach | None


@dataclass(frozen=True)
class Parameter:
    """The name is an argument of the function; `first` for `self`."""

    name: str
    first: bool


@dataclass(frozen=True)
class Outer:
    """The name is not local: a variable of a closure, a global or a builtin."""

    name: str


@dataclass(frozen=True)
class Opaque:
    """What the name holds cannot be told; `reason` says why."""

    reason: str


Reach = Bound | Augmented | Choice | Parameter | Outer | Opaque


class Flow:
    """The parents, the bindings and the written attributes of one function definition."""

    def __init__(self, tree: ast.FunctionDef) -> None:
        self.tree = tree
        self._parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
        self.nodes = (tree, *self._parents)
        self._bindings = _all_bindings(self.nodes)
        self._stores: dict[ast.AST, frozenset[str]] = {}
        self._memo: dict[tuple[str, ast.stmt], Reach] = {}
        self.parameters = tuple(_parameters(tree.args))
        self.keywords = tree.args.kwarg.arg if tree.args.kwarg else None
        self.written_attributes = frozenset(_written_attributes(tree))

    def parent(self, node: ast.AST) -> ast.AST | None:
        """The node that holds `node`; None for the function itself and for nodes of other trees."""
        return self._parents.get(node)

    def ancestors(self, node: ast.AST) -> Iterator[ast.AST]:
        """The nodes around `node`, from the innermost to the function itself."""
        while (outer := self._parents.get(node)) is not None:
            yield outer
            node = outer

    def bindings(self, name: str) -> list[ast.expr]:
        """The expression of every plain assignment to a local name, wherever it is."""
        return self._bindings.get(name, [])

    def stores(self, node: ast.AST) -> frozenset[str]:
        """Every name of the function's own scope that `node` or anything in it binds."""
        if node not in self._stores:
            self._stores[node] = frozenset(_leaking_names(node))
        return self._stores[node]

    def reach(self, name: str, at: ast.AST) -> Reach:
        """What `name` holds where the expression `at` is evaluated."""
        node, outer = at, self._parents.get(at)
        while outer is not None and not isinstance(node, ast.stmt):
            if isinstance(outer, _COMPREHENSIONS) and any(name in self.stores(g.target) for g in outer.generators):
                return Opaque(f"{name!r} is the variable of a comprehension")
            if isinstance(outer, ast.Lambda):
                return Opaque(f"{name!r} is read in a lambda") if name in _parameters(outer.args) else self._late(name)
            node, outer = outer, self._parents.get(outer)
        if not isinstance(node, ast.stmt) or outer is None:
            return Outer(name)
        if _walrus(node, name) or (isinstance(node, _LOOPS) and name in self.stores(node)):
            return Opaque(f"{name!r} is assigned in the statement or loop that reads it")
        return self._before(name, node)

    def _before(self, name: str, statement: ast.stmt) -> Reach:
        key = (name, statement)
        if key not in self._memo:
            self._memo[key] = self._search(name, statement)
        return self._memo[key]

    def _search(self, name: str, statement: ast.stmt) -> Reach:
        parent = self._parents[statement]
        for earlier in reversed(_earlier(parent, statement)):
            if name in self.stores(earlier):
                return self._after(name, earlier)
        if isinstance(parent, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return self._enter(name, parent)
        return self._leave_block(name, statement, parent)

    def _leave_block(self, name: str, statement: ast.stmt, parent: ast.AST) -> Reach:
        holder = parent if isinstance(parent, ast.stmt) else self._parents[parent]
        safe = isinstance(holder, (ast.If, ast.With)) or (isinstance(holder, ast.Try) and statement in holder.body)
        header = [holder.test] if isinstance(holder, ast.If) else getattr(holder, "items", [])
        if (name in self.stores(holder) and not safe) or any(name in self.stores(part) for part in header):
            return Opaque(f"{name!r} is assigned in a loop, a try or a header around its use")
        assert isinstance(holder, ast.stmt)
        return self._before(name, holder)

    def _enter(self, name: str, function: Definition) -> Reach:
        if name in _parameters(function.args):
            if function is self.tree:
                return Parameter(name, name == self.parameters[0])
            return Opaque(f"{name!r} is the argument of a nested function")
        if any(name in self.stores(statement) for statement in function.body):
            return Opaque(f"{name!r} is not assigned before its use")
        return Outer(name) if function is self.tree else self._late(name)

    def _late(self, name: str) -> Reach:
        """What a nested function reads: it may run after any later assignment."""
        rebound = frozenset(n for statement in self.tree.body for n in self.stores(statement))
        if name not in rebound:
            return Parameter(name, name == self.parameters[0]) if name in self.parameters else Outer(name)
        bindings = self.bindings(name)
        if len(bindings) == 1 and sum(name in set(_bound_names(node)) for node in self.nodes) == 1:
            return Bound(bindings[0])
        return Opaque(f"{name!r} is bound more than once around a nested function")

    def _after(self, name: str, statement: ast.stmt) -> Reach:
        """What `name` holds after `statement`, which binds it somewhere."""
        expression = _assigned(statement, name)
        if expression is not None and not _walrus(statement, name):
            return Bound(expression)
        if isinstance(statement, ast.AugAssign) and not _walrus(statement, name):
            return Augmented(statement)
        if isinstance(statement, ast.If) and not _walrus(statement, name):
            return self._branches(name, statement)
        if isinstance(statement, ast.With) and not any(name in self.stores(item) for item in statement.items):
            found = self._end(name, statement.body, statement)
            return found or Opaque(f"{name!r} is assigned after a jump")
        return Opaque(f"{name!r} is bound by {_describe(statement)}")

    def _branches(self, name: str, statement: ast.If) -> Reach:
        then = self._end(name, statement.body, statement)
        otherwise = self._end(name, statement.orelse, statement)
        return Choice(statement.test, then, otherwise)

    def _end(self, name: str, block: Block, holder: ast.stmt) -> Reach | None:
        if leaves(block):
            return None
        for statement in reversed(block):
            if name in self.stores(statement):
                return self._after(name, statement)
        return self._before(name, holder)


def _earlier(parent: ast.AST, statement: ast.stmt) -> Block:
    for _, block in ast.iter_fields(parent):
        if isinstance(block, list) and any(entry is statement for entry in block):
            return block[: next(i for i, entry in enumerate(block) if entry is statement)]
    return []


def leaves(block: Block) -> bool:
    """Whether control never passes the end of the block."""
    if not block:
        return False
    last = block[-1]
    if isinstance(last, ast.If):
        return leaves(last.body) and leaves(last.orelse)
    return isinstance(last, _LEAVING)


def _parameters(arguments: ast.arguments) -> Iterator[str]:
    for argument in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]:
        yield argument.arg
    for starred in (arguments.vararg, arguments.kwarg):
        if starred is not None:
            yield starred.arg


def _assigned(node: ast.AST, name: str) -> ast.expr | None:
    """The expression that a plain assignment gives to `name`, or None."""
    if isinstance(node, ast.AnnAssign):
        return node.value if isinstance(node.target, ast.Name) and node.target.id == name else None
    if not isinstance(node, ast.Assign):
        return None
    found = [_unpacked(target, node.value, name) for target in node.targets]
    stored = [t.id for target in node.targets for t in ast.walk(target) if isinstance(t, ast.Name) and _stored(t)]
    return next((f for f in found if f is not None), None) if stored.count(name) == 1 else None


def _all_bindings(nodes: Iterable[ast.AST]) -> dict[str, list[ast.expr]]:
    found: dict[str, list[ast.expr]] = {}
    for node in nodes:
        if isinstance(node, ast.NamedExpr):
            found.setdefault(node.target.id, []).append(node.value)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = {n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name) and _stored(n)}
            for name in names:
                if (expression := _assigned(node, name)) is not None:
                    found.setdefault(name, []).append(expression)
    return found


def _unpacked(target: ast.expr, value: ast.expr, name: str) -> ast.expr | None:
    if isinstance(target, ast.Name):
        return value if target.id == name else None
    if not isinstance(target, (ast.Tuple, ast.List)) or not isinstance(value, (ast.Tuple, ast.List)):
        return None
    if len(target.elts) != len(value.elts) or any(isinstance(e, ast.Starred) for e in [*target.elts, *value.elts]):
        return None
    pairs = zip(target.elts, value.elts, strict=True)
    return next((found for t, v in pairs if (found := _unpacked(t, v, name)) is not None), None)


def _stored(node: ast.Name | ast.Attribute) -> bool:
    return isinstance(node.ctx, (ast.Store, ast.Del))


def _bound_names(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Name) and _stored(node):
        yield node.id
    elif isinstance(node, (ast.Import, ast.ImportFrom)):
        yield from (alias.asname or alias.name.split(".")[0] for alias in node.names)
    elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        yield node.name
    elif isinstance(node, ast.ExceptHandler):
        yield from filter(None, [node.name])
    elif isinstance(node, (ast.Global, ast.Nonlocal)):
        yield from node.names
    elif isinstance(node, (ast.MatchAs, ast.MatchStar)):
        yield from filter(None, [node.name])
    elif isinstance(node, ast.MatchMapping):
        yield from filter(None, [node.rest])


def _leaking_names(root: ast.AST) -> Iterator[str]:
    """The bound names, without those of nested functions and the variables of comprehensions."""
    stack = [root]
    while stack:
        node = stack.pop()
        yield from _bound_names(node)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield from (name for n in ast.walk(node) if isinstance(n, ast.Nonlocal) for name in n.names)
        elif isinstance(node, ast.comprehension):
            stack.extend([node.iter, *node.ifs])
        else:
            stack.extend(ast.iter_child_nodes(node))


def _walrus(statement: ast.stmt, name: str) -> bool:
    """Whether an expression of the statement itself, blocks within it aside, binds `name` by `:=`."""
    stack = [child for child in ast.iter_child_nodes(statement) if not isinstance(child, ast.stmt)]
    while stack:
        node = stack.pop()
        if isinstance(node, ast.NamedExpr) and node.target.id == name:
            return True
        stack.extend(child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.stmt))
    return False


def _written_attributes(tree: ast.FunctionDef) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _stored(node):
            yield node.attr
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("setattr", "delattr"):
            name = node.args[1] if len(node.args) > 1 else None
            yield name.value if isinstance(name, ast.Constant) and isinstance(name.value, str) else "*"


def _describe(statement: ast.stmt) -> str:
    return f"a statement of kind {type(statement).__name__} on line {statement.lineno}"
