"""Keys as an error prints them."""

from __future__ import annotations

from collections.abc import Sequence

_SHOWN = 4


def listing(keys: Sequence[str]) -> str:
    """The first few keys, quoted, and how many more there are."""
    shown = ", ".join(repr(key) for key in keys[:_SHOWN])
    return shown if len(keys) <= _SHOWN else f"{shown} and {len(keys) - _SHOWN} more"
