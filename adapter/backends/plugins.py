"""Backends of other packages: entry points of the group `sinkhold.backends`, loaded when asked for by name."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from ..errors import BackendError

GROUP = "sinkhold.backends"


@dataclass(frozen=True)
class Plugin:
    """Where a backend of another package comes from."""

    name: str
    target: str
    distribution: str
    version: str


@functools.cache
def _found() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=GROUP)}


def names() -> list[str]:
    """Their names; nothing is imported."""
    return sorted(_found())


def listing() -> list[Plugin]:
    """Name, target, distribution and version of each; nothing is imported."""
    return [_describe(entry) for entry in _found().values()]


def _describe(entry: EntryPoint) -> Plugin:
    dist = entry.dist
    return Plugin(entry.name, entry.value, dist.name if dist else "unknown", dist.version if dist else "unknown")


def load(name: str) -> Any:
    """Import the backend `name`.

    Raises:
        BackendError: importing it fails, or what is found has another name or lacks an attribute of a backend.
    """
    plugin = _describe(_found()[name])
    where = f"{plugin.distribution} {plugin.version}, {plugin.target}"
    try:
        backend = _found()[name].load()
        backend = backend() if isinstance(backend, type) else backend
    except Exception as error:
        raise BackendError(f"backend {name!r} cannot be loaded: {error!r}", where=where) from error
    lacking = [a for a in ("name", "capability", "unavailable", "attend") if not hasattr(backend, a)]
    if lacking or getattr(backend, "name", "") != name:
        what = f"lacks {', '.join(lacking)}" if lacking else f"calls itself {backend.name!r}"
        raise BackendError(f"the entry point {name!r} is not a backend: it {what}", where=where)
    return backend
