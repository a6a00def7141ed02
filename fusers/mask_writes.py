"""Whether a module's forward changes a mask in place, which no look at the tensor can tell in a traced graph."""

from __future__ import annotations

import ast
from weakref import WeakKeyDictionary

from .errors import SourceError
from .source import read_forward

_KEPT: WeakKeyDictionary[type, bool] = WeakKeyDictionary()


def keeps_masks(cls: type) -> bool:
    """True when no statement of `cls.forward` writes into something that is called a mask; False without a source."""
    if cls not in _KEPT:
        try:
            tree = read_forward(cls).tree
        except SourceError:
            return _KEPT.setdefault(cls, False)
        dicts = _dicts(tree)
        _KEPT[cls] = not any(_writes(node, dicts) for node in ast.walk(tree))
    return _KEPT[cls]


def _dicts(tree: ast.FunctionDef) -> set[str]:
    """The names that only ever hold a dict which the function makes."""
    made: set[str] = set()
    other: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            (made if isinstance(node.value, (ast.Dict, ast.DictComp)) else other).add(node.targets[0].id)
    return made - other


def _writes(node: ast.AST, dicts: set[str]) -> bool:
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, (ast.Store, ast.Del)):
        # An entry of a dict of masks is replaced and not written into.
        keyed = isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str)
        keyed = keyed or (isinstance(node.value, ast.Name) and node.value.id in dicts)
        return not keyed and _is_mask(node.value)
    if isinstance(node, ast.AugAssign):
        return _is_mask(node.target)
    if isinstance(node, ast.Call):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        in_place = name.endswith("_") and not name.endswith("__") and isinstance(node.func, ast.Attribute)
        out = [keyword.value for keyword in node.keywords if keyword.arg == "out"]
        return any(map(_is_mask, out)) or (in_place and _is_mask(node.func.value))  # type: ignore[attr-defined]
    return False


def _is_mask(node: ast.expr) -> bool:
    """Any name within the written expression that says mask: views and entries of a mask are the mask."""
    names = (
        n.id if isinstance(n, ast.Name) else n.attr for n in ast.walk(node) if isinstance(n, (ast.Name, ast.Attribute))
    )
    return any("mask" in name.lower() for name in names)
