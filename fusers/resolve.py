"""An expression of a forward -> its value on a live module, or what it names on any instance. Nothing is executed."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Callable
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import nn

from .access import adds_axes, item, length, member_value, of_tensor, of_torch
from .base import Status, TensorRef, Value
from .errors import SourceError
from .flow import Augmented, Bound, Choice, Flow, Opaque, Outer, Parameter, Reach
from .members import MISSING, Computed, Unknown, read
from .source import read_function
from .values import (
    PURE,
    RESHAPES,
    Live,
    Symbol,
    binary,
    compare,
    guarded,
    inexact,
    is_number,
    is_plain,
    reshaped,
    same,
    truth,
    wrap,
)

_VOLATILE = {
    "training": "changes with train() and eval()",
    "_attn_implementation": "is what the adapter changes",
    "_attn_implementation_internal": "is what the adapter changes",
}
_MAX_STEPS = 5_000
_MAX_GETTERS = 8
_CONTAINERS = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp, ast.GeneratorExp)


class Resolver:
    """Resolves the expressions of one function.

    Args:
        flow: the function's data flow.
        function: the live function, for its globals and its closure.
        module: what `self` is; None to find out what an expression names on any instance.
    """

    def __init__(self, flow: Flow, function: FunctionType, module: nn.Module | None, *, getters: int = 0) -> None:
        self._flow = flow
        self._function = function
        self._root: Any = Symbol("self") if module is None else Live(module, "")
        self._getters = getters
        self._steps = 0

    def value(self, expression: ast.expr) -> Value:
        """The value of `expression`; DYNAMIC with the reason when it cannot be told without running the forward."""
        text = ast.unparse(expression)
        try:
            found = self.find(expression)
        except Unknown as unknown:
            return Value(Status.DYNAMIC, text, reason=str(unknown))
        if not is_plain(found) and not isinstance(found, (TensorRef, Symbol)):
            return Value(Status.DYNAMIC, text, reason=f"it is a {type(found.object).__name__}, not a plain value")
        return Value(Status.RESOLVED, text, found)

    def find(self, expression: ast.expr) -> Any:
        """A plain value, a TensorRef, a Live object, or a Symbol where only the class is known. Raises Unknown."""
        self._steps = 0
        try:
            return self._evaluate(expression)
        except RecursionError as error:
            raise Unknown("the chain of assignments is too long") from error

    def _evaluate(self, node: ast.expr) -> Any:
        self._steps += 1
        if self._steps > _MAX_STEPS:
            raise Unknown("it takes too many steps to follow")
        rule = _RULES.get(type(node))
        if rule is None:
            raise Unknown(f"{ast.unparse(node)!r} is known only when the forward runs")
        return rule(self, node)

    def _constant(self, node: ast.Constant) -> Any:
        return wrap(node.value)

    def _list(self, node: ast.List) -> Any:
        entries = [self._evaluate(entry) for entry in node.elts]
        if any(isinstance(entry, Symbol) for entry in entries):
            return Symbol(ast.unparse(node), exact=False)
        return Live(entries)

    def _tuple(self, node: ast.Tuple) -> Any:
        entries = tuple(self._evaluate(entry) for entry in node.elts)
        if any(isinstance(entry, Symbol) for entry in entries):
            return Symbol(ast.unparse(node), exact=False)
        return wrap(entries)

    def _name(self, node: ast.Name) -> Any:
        return self._reached(self._flow.reach(node.id, node))

    def _reached(self, reach: Reach) -> Any:
        if isinstance(reach, Bound):
            if isinstance(reach.expression, _CONTAINERS):
                raise Unknown("it is a list or dict that the forward may change")
            return self._evaluate(reach.expression)
        if isinstance(reach, Parameter):
            if reach.first:
                return self._root
            raise Unknown(f"{reach.name!r} is an argument of the forward")
        if isinstance(reach, Choice):
            return self._branches(reach)
        if isinstance(reach, Augmented):
            return self._augmented(reach.statement)
        if isinstance(reach, Outer):
            return self._outer(reach.name)
        raise Unknown(reach.reason)

    def _branches(self, choice: Choice) -> Any:
        then, otherwise = choice.then, choice.otherwise
        if then is None or otherwise is None:
            return self._reached(then or otherwise or Opaque("no branch arrives here"))
        return self._choose(choice.test, lambda: self._reached(then), lambda: self._reached(otherwise))

    def _augmented(self, statement: ast.AugAssign) -> Any:
        assert isinstance(statement.target, ast.Name)
        left = self._reached(self._flow.reach(statement.target.id, statement))
        return binary(statement.op, left, self._evaluate(statement.value), ast.unparse(statement))

    def _outer(self, name: str) -> Any:
        code, cells = self._function.__code__, self._function.__closure__ or ()
        if name in code.co_freevars:
            try:
                return wrap(cells[code.co_freevars.index(name)].cell_contents)
            except ValueError as error:
                raise Unknown(f"the variable {name!r} of the enclosing function is empty") from error
        found = self._function.__globals__.get(name, getattr(builtins, name, MISSING))
        if found is MISSING:
            raise Unknown(f"the name {name!r} is not defined")
        return wrap(found)

    def _choose(self, test: ast.expr, then: Callable[[], Any], otherwise: Callable[[], Any]) -> Any:
        try:
            decided = truth(self._evaluate(test))
        except Unknown as unknown:
            left, right = then(), otherwise()
            if same(left, right):
                return left
            raise Unknown(f"it depends on {ast.unparse(test)!r}: {unknown}") from unknown
        if decided is not None:
            return then() if decided else otherwise()
        left, right = then(), otherwise()
        exact = all(side.exact for side in (left, right) if isinstance(side, Symbol))
        return left if same(left, right) else Symbol(f"one of two by {ast.unparse(test)}", exact)

    def _conditional(self, node: ast.IfExp) -> Any:
        return self._choose(node.test, lambda: self._evaluate(node.body), lambda: self._evaluate(node.orelse))

    def _binary(self, node: ast.BinOp) -> Any:
        return binary(node.op, self._evaluate(node.left), self._evaluate(node.right), ast.unparse(node))

    def _unary(self, node: ast.UnaryOp) -> Any:
        operand = self._evaluate(node.operand)
        if isinstance(node.op, ast.Not):
            decided = truth(operand)
            return Symbol(ast.unparse(node)) if decided is None else not decided
        if isinstance(operand, Symbol):
            return Symbol(ast.unparse(node), exact=False)
        if isinstance(operand, TensorRef):
            return inexact(operand, "negate")
        if isinstance(node.op, ast.Invert) or not is_number(operand):
            raise Unknown(f"{ast.unparse(node)!r} is not arithmetic of numbers")
        return -operand if isinstance(node.op, ast.USub) else +operand

    def _boolean(self, node: ast.BoolOp) -> Any:
        stops = isinstance(node.op, ast.Or)
        found: Any = None
        for operand in node.values:
            found = self._evaluate(operand)
            decided = truth(found) if operand is not node.values[-1] else None
            if decided is None and operand is not node.values[-1]:
                [self._evaluate(rest) for rest in node.values]
                return Symbol(ast.unparse(node), exact=False)
            if decided is stops:
                return found
        return found

    def _comparison(self, node: ast.Compare) -> Any:
        left = self._evaluate(node.left)
        text = ast.unparse(node)
        result: Any = True
        for op, operand in zip(node.ops, node.comparators, strict=True):
            right = self._evaluate(operand)
            if isinstance(left, Symbol) or isinstance(right, Symbol):
                result = Symbol(text)
            else:
                held = compare(op, left, right, text)
                if held is False:
                    return False
            left = right
        return result

    def _attribute(self, node: ast.Attribute) -> Any:
        return self._member(self._evaluate(node.value), node.attr)

    def _member(self, owner: Any, name: str) -> Any:
        found = self._read(owner, name)
        if found is MISSING:
            raise Unknown(f"there is no attribute {name!r}")
        return found

    def _read(self, owner: Any, name: str) -> Any:
        if name in _VOLATILE:
            raise Unknown(f"{name!r} {_VOLATILE[name]}")
        if name in self._flow.written_attributes or "*" in self._flow.written_attributes:
            raise Unknown(f"the forward itself assigns the attribute {name!r}")
        if isinstance(owner, Symbol):
            return Symbol(f"{owner.text}.{name}", owner.exact or name not in RESHAPES)
        if isinstance(owner, TensorRef):
            return of_tensor(owner, name)
        if not isinstance(owner, Live):
            raise Unknown(f"{name!r} of a {type(owner).__name__} is not followed")
        found = read(owner.object, name)
        if isinstance(found, Computed):
            return self._computed(owner, found.getter, name)
        return found if found is MISSING else member_value(owner, name, found)

    def _computed(self, owner: Live, getter: FunctionType, name: str) -> Any:
        if self._getters >= _MAX_GETTERS:
            raise Unknown(f"the property {name!r} calls too many others")
        try:
            tree = read_function(getter, where=name).tree
        except SourceError as error:
            raise Unknown(f"the property {name!r} cannot be read: {error.what}") from error
        body = [s for s in tree.body if not (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))]
        if len(body) != 1 or not isinstance(body[0], ast.Return) or body[0].value is None:
            raise Unknown(f"the property {name!r} does more than return an expression")
        inner = Resolver(Flow(tree), getter, None, getters=self._getters + 1)
        inner._root = owner
        return inner.find(body[0].value)

    def _subscript(self, node: ast.Subscript) -> Any:
        base, text = self._evaluate(node.value), ast.unparse(node)
        if isinstance(base, (TensorRef, Symbol)) and adds_axes(node.slice):
            return reshaped(base, "unsqueeze") if isinstance(base, TensorRef) else base
        index = self._evaluate(node.slice)
        if isinstance(base, Symbol) or isinstance(index, Symbol):
            return Symbol(text, exact=False)
        if isinstance(base, TensorRef):
            return inexact(base, f"[{ast.unparse(node.slice)}]")
        return item(base, index, text)

    def _literal(self, node: ast.Dict) -> Any:
        if any(key is None for key in node.keys):
            raise Unknown("a dict with another one spread in it is not followed")
        keys = [self._evaluate(key) for key in node.keys if key is not None]
        values = [self._evaluate(value) for value in node.values]
        if any(isinstance(entry, Symbol) for entry in [*keys, *values]):
            return Symbol(ast.unparse(node), exact=False)
        if not all(is_plain(key) for key in keys):
            raise Unknown("the keys of a dict are objects")
        return Live(dict(zip(keys, values, strict=True)))

    def _call(self, node: ast.Call) -> Any:
        if isinstance(node.func, ast.Attribute):
            base = self._evaluate(node.func.value)
            if isinstance(base, (TensorRef, Symbol)):
                return self._method(base, node.func.attr, node)
            if isinstance(base, Live) and type(base.object) is dict and node.func.attr == "get":
                return self._get(base, node)
            function = self._member(base, node.func.attr)
        else:
            function = self._evaluate(node.func)
        return self._function_call(function.object if isinstance(function, Live) else None, node)

    def _method(self, base: Any, name: str, node: ast.Call) -> Any:
        if name in RESHAPES:
            return reshaped(base, name) if isinstance(base, TensorRef) else base
        if isinstance(base, Symbol):
            raise Unknown(f"{ast.unparse(node.func)!r} is called when the forward runs")
        self._arguments(node)
        return inexact(base, name)

    def _get(self, base: Live, node: ast.Call) -> Any:
        key, *default = self._arguments(node)
        if not is_plain(key):
            raise Unknown("the key of a dict is an object")
        return wrap(base.object.get(key, *default))

    def _function_call(self, function: Any, node: ast.Call) -> Any:
        text = ast.unparse(node)
        if function is getattr or function is hasattr:
            return self._getattr(function, self._arguments(node), text)
        if type(function) not in (FunctionType, BuiltinFunctionType, type):
            raise Unknown(f"{text!r} calls what cannot be found")
        if of_torch(function):
            return self._torch_call(function, node)
        if function is not len and not any(function is pure for pure in PURE):
            raise Unknown(f"{text!r} calls a function of the model")
        arguments = self._arguments(node)
        if any(isinstance(argument, Symbol) for argument in arguments):
            return Symbol(text, exact=False)
        if function is len:
            return length(arguments, text)
        if not all(is_number(argument) for argument in arguments):
            raise Unknown(f"{text!r} is not a function of numbers")
        return guarded(lambda: function(*arguments), text)

    def _getattr(self, function: Any, arguments: list[Any], text: str) -> Any:
        if len(arguments) < 2 or type(arguments[1]) is not str:
            raise Unknown(f"{text!r} reads an attribute whose name is not a constant")
        found = self._read(arguments[0], arguments[1])
        if function is hasattr:
            return Symbol(text) if isinstance(found, Symbol) else found is not MISSING
        if found is MISSING and len(arguments) < 3:
            raise Unknown(f"there is no attribute {arguments[1]!r}")
        return arguments[2] if found is MISSING else found

    def _torch_call(self, function: Any, node: ast.Call) -> Any:
        name, text = function.__name__, ast.unparse(node)
        if not node.args or (node.keywords and name not in RESHAPES):
            raise Unknown(f"{text!r} is computed when the forward runs")
        first = self._evaluate(node.args[0])
        if isinstance(first, (TensorRef, Symbol)) and name in RESHAPES:
            return reshaped(first, name) if isinstance(first, TensorRef) else first
        self._arguments(node)
        if function is torch.tensor and len(node.args) == 1 and is_number(first):
            return torch.tensor(first, dtype=torch.float32, device="cpu").item() if type(first) is float else first
        if isinstance(first, TensorRef):
            return inexact(first, name)
        if isinstance(first, Symbol):
            return Symbol(text, exact=False)
        raise Unknown(f"{text!r} is computed when the forward runs")

    def _arguments(self, node: ast.Call) -> list[Any]:
        if node.keywords or any(isinstance(argument, ast.Starred) for argument in node.args):
            raise Unknown(f"{ast.unparse(node)!r} has arguments that are not followed")
        return [self._evaluate(argument) for argument in node.args]


_RULES: dict[type[ast.expr], Callable[[Resolver, Any], Any]] = {
    ast.Constant: Resolver._constant,
    ast.Tuple: Resolver._tuple,
    ast.List: Resolver._list,
    ast.Dict: Resolver._literal,
    ast.Name: Resolver._name,
    ast.IfExp: Resolver._conditional,
    ast.BinOp: Resolver._binary,
    ast.UnaryOp: Resolver._unary,
    ast.BoolOp: Resolver._boolean,
    ast.Compare: Resolver._comparison,
    ast.Attribute: Resolver._attribute,
    ast.Subscript: Resolver._subscript,
    ast.Call: Resolver._call,
}
