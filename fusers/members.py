"""Attributes of live objects read without running any of the objects' own code."""

from __future__ import annotations

import functools
import inspect
from types import FunctionType, GetSetDescriptorType, MemberDescriptorType, ModuleType
from typing import Any

import torch
from torch import nn

MISSING = object()


class Unknown(Exception):
    """Internal to the resolver: an expression has no value that can be found; the text says why."""


class Computed:
    """An attribute that only its getter can give; a simple getter is resolved from its source instead of being run."""

    def __init__(self, getter: FunctionType) -> None:
        self.getter = getter


def read(owner: Any, name: str) -> Any:
    """The attribute `name` of `owner`, a Computed for a property, or MISSING.

    Raises:
        Unknown: finding out would run code of the object (a descriptor, `__getattr__`, a lazy module).
    """
    # isinstance would ask the object for its __class__
    if issubclass(type(owner), ModuleType):
        return _of_python_module(owner, name)
    if issubclass(type(owner), type):
        return _plain_member(owner, inspect.getattr_static(owner, name, MISSING), name)
    name = _renamed(owner, name)
    on_class = inspect.getattr_static(type(owner), name, MISSING)
    if on_class is not MISSING and hasattr(type(on_class), "__set__"):
        return _described(owner, on_class, name)
    held = _held(owner, name)
    if held is not MISSING:
        return held
    if on_class is not MISSING:
        return _described(owner, on_class, name)
    if issubclass(type(owner), nn.Module):
        return _registered(owner, name)
    if inspect.getattr_static(type(owner), "__getattr__", None) is not None:
        raise Unknown(f"{type(owner).__name__} computes the attribute {name!r}")
    return MISSING


def _of_python_module(owner: ModuleType, name: str) -> Any:
    found = vars(owner).get(name, MISSING)
    lazy = "__getattr__" in vars(owner) or inspect.getattr_static(type(owner), "__getattr__", None) is not None
    if found is MISSING and lazy:
        raise Unknown(f"the module {owner.__name__} loads {name!r} on demand")
    return found


def _renamed(owner: Any, name: str) -> str:
    """Transformers' configurations give some attributes a second name, in the class's `attribute_map`."""
    reader = inspect.getattr_static(type(owner), "__getattribute__", None)
    if reader is object.__getattribute__:
        return name
    names = inspect.getattr_static(type(owner), "attribute_map", None)
    if getattr(reader, "__module__", "") != "transformers.configuration_utils" or not isinstance(names, dict):
        raise Unknown(f"{type(owner).__name__} customises the reading of attributes")
    return str(names.get(name, name))


def _held(owner: Any, name: str) -> Any:
    try:
        own = object.__getattribute__(owner, "__dict__")
    except AttributeError:
        return MISSING
    return own.get(name, MISSING)


def _described(owner: Any, found: Any, name: str) -> Any:
    if isinstance(found, (MemberDescriptorType, GetSetDescriptorType)):
        try:
            return found.__get__(owner)
        except AttributeError:
            return MISSING
    getter = found.fget if isinstance(found, property) else getattr(found, "func", None)
    if isinstance(found, (property, functools.cached_property)) and isinstance(getter, FunctionType):
        return Computed(getter)
    return _plain_member(type(owner), found, name)


def _plain_member(cls: type, found: Any, name: str) -> Any:
    if hasattr(type(found), "__get__"):
        raise Unknown(f"{cls.__name__}.{name} is a {type(found).__name__}")
    return found


def _registered(module: nn.Module, name: str) -> Any:
    # torch's own __getattr__ looks in these three, in this order; a class may bring another one.
    if inspect.getattr_static(type(module), "__getattr__", None) is not nn.Module.__getattr__:
        raise Unknown(f"{type(module).__name__} computes the attribute {name!r}")
    for table in ("_parameters", "_buffers", "_modules"):
        found = module.__dict__.get(table, {}).get(name, MISSING)
        if found is not MISSING:
            return found
    return MISSING


def is_registered(module: nn.Module, name: str, tensor: torch.Tensor) -> bool:
    """Whether `tensor` is the parameter or buffer that `module` holds under `name`."""
    return any(module.__dict__.get(table, {}).get(name) is tensor for table in ("_parameters", "_buffers"))
