"""The values that the resolver reckons with, and the operations on them that run no code of a model."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from .base import TensorRef
from .members import Unknown

RESHAPES = frozenset((
    "to", "float", "half", "bfloat16", "double", "type", "type_as", "view", "view_as", "reshape", "contiguous",
    "unsqueeze", "squeeze", "expand", "expand_as", "flatten", "unflatten", "clone", "detach", "cpu", "cuda",
    "transpose", "permute", "swapaxes", "movedim", "to_local", "full_tensor", "data", "T", "mT",
))  # fmt: skip
"""Tensor methods and attributes after which every sink is still the logit of the same head."""

PURE: tuple[Callable[..., Any], ...] = (
    abs, bool, float, int, max, min, pow, round, math.ceil, math.exp, math.fabs, math.floor, math.log, math.log10,
    math.log1p, math.log2, math.pow, math.sqrt, math.trunc, math.isqrt,
)  # fmt: skip
"""Functions of numbers that the resolver may call."""

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_SIGNS: dict[ast.operator | type[ast.operator], str] = {
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.Div: "/",
    ast.FloorDiv: "//",
    ast.Mod: "%",
    ast.Pow: "**",
}
_ORDER: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_LARGEST_INT_BITS = 4096


@dataclass(frozen=True)
class Symbol:
    """What an expression names on some instance, when only the class is known. `exact` is as in TensorRef."""

    text: str
    exact: bool = True


@dataclass(frozen=True, eq=False)
class Live:
    """A live object that is no plain value; `path` is its place among the attention's submodules, None elsewhere."""

    object: Any
    path: str | None = None


def wrap(found: Any, path: str | None = None) -> Any:
    """A plain value as itself, without the methods of a subclass; anything else as a Live object."""
    if found is None or type(found) in (bool, int, float, str, torch.dtype):
        return found
    for kind in (float, int, str):
        if issubclass(type(found), kind):
            return getattr(kind, f"__{kind.__name__}__")(found)
    if type(found).__module__ == "numpy" and getattr(found, "ndim", None) == 0:
        return wrap(found.item())
    if type(found) is tuple and all(is_plain(entry) for entry in found):
        return found
    return Live(found, path)


def is_plain(value: Any) -> bool:
    """Whether `value` can be printed, compared and kept without holding on to the model."""
    if type(value) is tuple:
        return all(is_plain(entry) for entry in value)
    return value is None or type(value) in (bool, int, float, str, torch.dtype)


def is_number(value: Any) -> bool:
    """Whether `value` is an int, a float or a bool."""
    return type(value) in (bool, int, float)


def same(left: Any, right: Any) -> bool:
    """Whether two resolved values are one."""
    if isinstance(left, Live) and isinstance(right, Live):
        return left.object is right.object
    return type(left) is type(right) and bool(left == right)


def truth(value: Any) -> bool | None:
    """Whether a test holds; None when it depends on the instance. Raises Unknown."""
    if isinstance(value, Symbol):
        return None
    if is_plain(value):
        return bool(value)
    if isinstance(value, Live) and type(value.object) in (list, dict, tuple):
        return bool(value.object)
    raise Unknown("a tensor or an object is used as a test")


def binary(op: ast.operator, left: Any, right: Any, text: str) -> Any:
    """The value of `left op right`. Raises Unknown."""
    if isinstance(left, Symbol) or isinstance(right, Symbol):
        return Symbol(text, exact=False)
    sign = _SIGNS.get(type(op))
    for tensor, other in ((left, right), (right, left)):
        if isinstance(tensor, TensorRef) and is_number(other) and sign:
            return inexact(tensor, f"{sign} {other}" if tensor is left else f"{other} {sign}")
    if sign is None or not is_number(left) or not is_number(right):
        raise Unknown(f"{text!r} is not arithmetic of numbers")
    if isinstance(op, ast.Pow) and _too_large(left, right):
        raise Unknown(f"{text!r} is too large a number")
    return guarded(lambda: _BINARY[type(op)](left, right), text)


def _too_large(base: Any, exponent: Any) -> bool:
    if type(base) is float or type(exponent) is float:
        return False
    return bool(abs(exponent) * abs(base).bit_length() > _LARGEST_INT_BITS)


def guarded(compute: Callable[[], Any], text: str) -> Any:
    """The number that `compute` gives. Raises Unknown where it gives none, or a complex one."""
    try:
        result = compute()
    except (ArithmeticError, ValueError, TypeError) as error:
        raise Unknown(f"{text!r} has no value: {error}") from error
    if not is_number(result):
        raise Unknown(f"{text!r} is not a real number")
    return result


def compare(op: ast.cmpop, left: Any, right: Any, text: str) -> Any:
    """The value of one comparison. Raises Unknown."""
    if isinstance(op, (ast.Is, ast.IsNot)):
        return _identical(left, right, text) is isinstance(op, ast.Is)
    if isinstance(left, Symbol) or isinstance(right, Symbol):
        return Symbol(text)
    if isinstance(op, (ast.In, ast.NotIn)):
        return _contains(right, left, text) is isinstance(op, ast.In)
    if not is_plain(left) or not is_plain(right):
        raise Unknown(f"{text!r} compares objects")
    try:
        return bool(_ORDER[type(op)](left, right))
    except TypeError as error:
        raise Unknown(f"{text!r} has no value: {error}") from error


def _identical(left: Any, right: Any, text: str) -> bool:
    singletons = (None, True, False)
    if not any(value is one for value in (left, right) for one in singletons):
        raise Unknown(f"{text!r} compares identities")
    return left is right


def _contains(container: Any, value: Any, text: str) -> bool:
    held = container.object if isinstance(container, Live) else container
    if not is_plain(value) or type(held) not in (tuple, list, dict, set, frozenset, str):
        raise Unknown(f"{text!r} looks into an object")
    if type(held) is not str and not all(is_plain(entry) for entry in held):
        raise Unknown(f"{text!r} looks into a collection of objects")
    try:
        return bool(value in held)
    except TypeError as error:
        raise Unknown(f"{text!r} has no value: {error}") from error


def reshaped(tensor: TensorRef, name: str) -> TensorRef:
    """The tensor after a reshaping or a cast."""
    return replace(tensor, transforms=(*tensor.transforms, name))


def inexact(tensor: TensorRef, name: str) -> TensorRef:
    """The tensor after an operation that changes its numbers or its order."""
    return replace(tensor, transforms=(*tensor.transforms, name), exact=False)
