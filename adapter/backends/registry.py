"""The backends by name, and the choice among them for a layer."""

from __future__ import annotations

import importlib
from typing import Protocol

import torch

from ..errors import BackendError
from . import plugins, proof
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


AUTO = "auto"
_TRUSTED = frozenset({"reference", "eager"})
_EVERYWHERE = frozenset({"cpu", "cuda", "mps", "xpu"})
# name -> devices for which its module is worth importing; the order is the one in which auto tries them
_BUILT_IN = {
    "triton": frozenset({"cuda"}),
    "sdpa": frozenset({"cpu", "cuda"}),
    "flex": frozenset({"cuda"}),
    "eager": _EVERYWHERE,
    "reference": _EVERYWHERE,
}

_backends: dict[str, Backend] = {}
_selected: dict[tuple[str, Needs], Backend] = {}


def register(backend: Backend) -> None:
    """Add a backend that is used when asked for by name; a second one of the same name is refused."""
    if backend.name in names() or backend.name == AUTO:
        raise BackendError(
            f"a backend named {backend.name!r} is registered already",
            fix="give it another name, or unregister the other",
        )
    _backends[backend.name] = backend


def unregister(name: str) -> None:
    """Take a registered backend out again; those of the project stay."""
    if name in _BUILT_IN or name not in _backends:
        raise BackendError(f"{name!r} is not a backend that was registered", fix="pass a name given to register()")
    proof.forget(_backends.pop(name))
    for key in [k for k, backend in _selected.items() if backend.name == name]:
        del _selected[key]


def names() -> list[str]:
    """All names: the project's own in the order of `auto`, then registered ones, then those of other packages."""
    return list(dict.fromkeys([*_BUILT_IN, *_backends, *plugins.names()]))


def get(name: str) -> Backend:
    """The backend called `name`, imported when it is first asked for.

    Raises:
        BackendError: no such name (the known ones are listed), or its module cannot be imported.
    """
    if name not in _backends:
        _backends[name] = _load(name)
    return _backends[name]


def _load(name: str) -> Backend:
    if name in _BUILT_IN:
        try:
            backend: Backend = importlib.import_module(f"{__package__}.{name}").BACKEND
        except ImportError as error:
            raise BackendError(
                f"backend {name!r} cannot be imported: {error}", where=f"{__package__}.{name}"
            ) from error
        return backend
    if name in plugins.names():
        plugin: Backend = plugins.load(name)
        return plugin
    raise BackendError(f"there is no backend {name!r}", fix=f"use one of: {', '.join([AUTO, *names()])}")


def refusals(name: str, needs: Needs, *, asked_for: bool = False) -> list[str]:
    """Why `name` cannot serve `needs`, every reason; empty when it can.

    One that is not asked for is not imported for a device that it is not meant for, nor taken there.
    """
    devices = _BUILT_IN.get(name, _EVERYWHERE)
    if needs.device not in devices and not asked_for:
        return [f"device {needs.device} (has {', '.join(sorted(devices))})"]
    try:
        backend = get(name)
    except BackendError as error:
        if name in names():
            return [error.what]
        raise
    reason = backend.unavailable()
    return [*([reason] if reason else []), *backend.capability.refusals(needs)]


def explain(needs: Needs) -> dict[str, list[str]]:
    """For every backend, why it cannot serve `needs`; an empty list where it can."""
    return {name: refusals(name, needs) for name in names()}


def select(name: str, needs: Needs, *, traced: bool = False) -> Backend:
    """The backend for `needs`: the named one or an error; for 'auto' the first that refuses nothing. Proven before use.

    Args:
        traced: the choice is made for a graph that torch.compile traces, where nothing can be proven.

    Raises:
        BackendError: the named one, or every one, refuses; each reason is listed.
        ProofError: the chosen one computes something else than the reference on this machine.
    """
    backend = _selected.get((name, needs))
    if backend is None:
        backend = _choose(name, needs)
        if backend.name not in _TRUSTED:
            proof.prove(backend, needs, traced=traced)
        if not traced and not torch.compiler.is_compiling():
            _selected[name, needs] = backend
    return backend


def _choose(name: str, needs: Needs) -> Backend:
    if name != AUTO:
        reasons = refusals(name, needs, asked_for=True)
        if reasons:
            raise BackendError(f"backend {name!r} cannot run this layer: {'; '.join(reasons)}")
        return get(name)
    reasons_by_name = {}
    for candidate in _BUILT_IN:
        reasons_by_name[candidate] = refusals(candidate, needs)
        if not reasons_by_name[candidate]:
            return get(candidate)
    listing = "\n".join(f"    {n}: {'; '.join(r)}" for n, r in reasons_by_name.items())
    raise BackendError(f"no backend can run this layer:\n{listing}")
