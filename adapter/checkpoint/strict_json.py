"""JSON as the checkpoint formats mean it: one object, each key once, no NaN."""

from __future__ import annotations

import json
from typing import Any


class RepeatedKey(ValueError):
    """A key stands twice in one JSON object."""


def parse_object(text: bytes) -> dict[str, Any]:
    """The JSON object in `text` (UTF-8).

    Raises:
        RepeatedKey: an object at any depth holds a key twice.
        ValueError: anything else that is not one JSON object, deep nesting and endless numbers included.
    """
    try:
        parsed = json.loads(text.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(parsed, dict):
        raise ValueError(f"it is a {type(parsed).__name__}, not an object")
    return parsed


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise RepeatedKey(f"the key {key!r} stands twice in one object")
        found[key] = value
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
