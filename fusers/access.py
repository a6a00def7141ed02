"""Attributes, entries and lengths of the values that the resolver meets."""

from __future__ import annotations

import ast
from typing import Any

import torch
from torch import nn

from .base import TensorRef
from .members import MISSING, Unknown, is_registered, read
from .values import RESHAPES, Live, is_plain, reshaped, wrap


def of_tensor(tensor: TensorRef, name: str) -> Any:
    """What is known of a parameter's attribute without its data. Raises Unknown."""
    if name in RESHAPES:
        return reshaped(tensor, name)
    known = {"shape": tensor.shape, "dtype": tensor.dtype, "ndim": len(tensor.shape)}
    if name not in known:
        raise Unknown(f"the tensor's {name!r} is known only when the forward runs")
    return known[name]


def member_value(owner: Live, name: str, found: Any) -> Any:
    """What `owner` holds under `name`: tensors by their path, submodules with theirs. Raises Unknown."""
    path = f"{owner.path}.{name}" if owner.path else name if owner.path == "" else None
    inside = issubclass(type(owner.object), nn.Module)
    if not issubclass(type(found), torch.Tensor):
        held = inside and owner.object._modules.get(name) is found
        return wrap(found, path if held else None)
    if path is not None and inside and is_registered(owner.object, name, found):
        return TensorRef(path, tuple(found.shape), found.dtype)
    if type(found) is torch.Tensor and found.numel() == 1 and found.device.type == "cpu" and not found.requires_grad:
        return wrap(found.item())
    raise Unknown(f"{name!r} is a tensor that is no parameter or buffer of the attention")


def item(base: Any, index: Any, text: str) -> Any:
    """An entry of a list, a tuple, a dict or a list of modules. Raises Unknown."""
    held = base.object if isinstance(base, Live) else base
    if issubclass(type(held), (nn.ModuleList, nn.ParameterList)) and type(index) is int:
        place = str(index + len(held) if index < 0 else index)
        found = read(held, place)
        if found is MISSING:
            raise Unknown(f"{text!r} is out of range")
        return member_value(base, place, found)
    if type(held) not in (list, tuple, dict) or not is_plain(index):
        raise Unknown(f"{text!r} looks into an object")
    try:
        return wrap(held[index])
    except (LookupError, TypeError) as error:
        raise Unknown(f"{text!r} is not there") from error


def length(arguments: list[Any], text: str) -> int:
    """The length of a builtin container. Raises Unknown."""
    held = arguments[0].object if arguments and isinstance(arguments[0], Live) else next(iter(arguments), None)
    if not isinstance(held, (list, tuple, dict, str)) or type(held) not in (list, tuple, dict, str):
        raise Unknown(f"{text!r} is the length of an object")
    return len(held)


def adds_axes(index: ast.expr) -> bool:
    """Whether a subscript only adds axes: None, `...` and `:`."""
    entries = index.elts if isinstance(index, ast.Tuple) else [index]
    return all(
        (isinstance(e, ast.Constant) and (e.value is None or e.value is ...))
        or (isinstance(e, ast.Slice) and e.lower is None and e.upper is None and e.step is None)
        for e in entries
    )


def of_torch(function: Any) -> bool:
    """Whether `function` is one of torch or torch.nn.functional."""
    name = getattr(function, "__name__", None)
    homes = (torch, torch.nn.functional)
    return isinstance(name, str) and any(vars(home).get(name) is function for home in homes)
