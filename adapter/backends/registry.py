"""The backends by name, and the choice among them for a layer."""

from __future__ import annotations

from typing import Protocol

from ..errors import BackendError
from .call import Attended, AttentionCall
from .capability import Capability, Needs


class Backend(Protocol):
    """An implementation of attention."""

    name: str
    capability: Capability

    def unavailable(self) -> str | None:
        """None when it can run here, else the reason (package missing, version, no device)."""

    def attend(self, call: AttentionCall) -> Attended:
        """Compute one call. Called only for calls whose needs the capability covers."""


_BACKENDS: dict[str, Backend] = {}
AUTO = "auto"


def register(backend: Backend) -> None:
    """Add a backend at the end of the order of preference; a second one of the same name is refused."""
    if backend.name in _BACKENDS or backend.name == AUTO:
        raise BackendError(f"a backend named {backend.name!r} is registered already")
    _BACKENDS[backend.name] = backend


def names() -> list[str]:
    """All registered names, in the order in which `auto` tries them."""
    return list(_BACKENDS)


def get(name: str) -> Backend:
    """The backend called `name`; raises BackendError with the known names."""
    try:
        return _BACKENDS[name]
    except KeyError:
        raise BackendError(
            f"there is no backend {name!r}", fix=f"use one of: {', '.join([AUTO, *_BACKENDS])}"
        ) from None


def refusals(name: str, needs: Needs) -> list[str]:
    """Why `name` cannot serve `needs`; empty when it can."""
    backend = get(name)
    reason = backend.unavailable()
    return [reason] if reason else backend.capability.refusals(needs)


def select(name: str, needs: Needs) -> Backend:
    """The backend for `needs`: the named one or an error; for 'auto' the first that refuses nothing."""
    if name != AUTO:
        reasons = refusals(name, needs)
        if reasons:
            raise BackendError(f"backend {name!r} cannot run this layer: {'; '.join(reasons)}")
        return get(name)
    reasons_by_name = {candidate: refusals(candidate, needs) for candidate in _BACKENDS}
    for candidate, reasons in reasons_by_name.items():
        if not reasons:
            return _BACKENDS[candidate]
    listing = "\n".join(f"    {n}: {'; '.join(r)}" for n, r in reasons_by_name.items())
    raise BackendError(f"no backend can run this layer:\n{listing}")
