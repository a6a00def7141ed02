"""Refuses a foreign package that stands under one of this project's import names."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

MARKER = "sinkhold"
_REMEDY = (
    "rename or move it, start Python from another folder, or uninstall the package it belongs to "
    "(pip uninstall NAME), then install sinkhold again"
)


def check(name: str, expected: Path) -> None:
    """Raise ImportError unless the package `name` that Python finds lies in the folder `expected`."""
    loaded = sys.modules.get(name)
    spec = getattr(loaded, "__spec__", None) if loaded is not None else importlib.util.find_spec(name)
    folders = [Path(p).resolve() for p in (spec.submodule_search_locations or ())] if spec is not None else []
    if expected.resolve() in folders:
        return
    found = (
        (spec.origin or ", ".join(map(str, folders)) or "a module without a file") if spec is not None else "nothing"
    )
    raise ImportError(
        f"sinkhold needs its own package {name!r} in {expected}, but Python finds {found}. "
        f"A foreign {name!r} is in the way: {_REMEDY}."
    )


check("fusers", Path(__file__).resolve().parent.parent / "fusers")
