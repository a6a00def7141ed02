"""A backend is trusted only after it has computed on this machine what the reference computes."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import torch

from ..errors import ProofError
from .capability import Feature, Needs
from .cases import Case
from .contract import check

if TYPE_CHECKING:
    from .registry import Backend

# longer on a GPU, where the blocks of kernels are longer and a proof costs launches rather than arithmetic
_PREFILL = {"cpu": ((34, 34, 0), (7, 33, 26)), "cuda": ((150, 150, 0), (7, 150, 143))}
_DECODE = ((1, 33, 32), (1, 40, 20))

_lock = threading.RLock()
_outcomes: dict[tuple[Backend, Needs], ProofError | None] = {}


def prove(backend: Backend, needs: Needs, *, traced: bool = False) -> None:
    """Run small random cases of this kind with large sinks; the outcome is kept for the process.

    While torch.compile traces or a CUDA graph is captured nothing can run: then only an earlier failure is raised.

    Args:
        traced: the choice is made for a graph that torch.compile traces.

    Raises:
        ProofError: names the backend, the case, the tensor and its error.
    """
    key = (backend, needs)
    if key not in _outcomes and not traced and not _recording(needs):
        with _lock:
            if key not in _outcomes:
                _outcomes[key] = _outcome(backend, needs)
    failure = _outcomes.get(key)
    if failure is not None:
        raise failure


def is_proven(backend: Backend, needs: Needs) -> bool:
    """Whether the proof has run and passed."""
    return _outcomes.get((backend, needs), ProofError("not run")) is None


def forget(backend: Backend) -> None:
    """Drop what is known about a backend."""
    with _lock:
        for key in [k for k in _outcomes if k[0] is backend]:
            del _outcomes[key]


def cases_of(needs: Needs) -> list[Case]:
    """The cases of a proof: the head dims, dtype and features of the call, at most two kv heads, short lengths."""
    group = needs.num_heads // needs.num_kv_heads
    num_kv_heads = min(2, needs.num_kv_heads)
    found = []
    for q_length, kv_length, q_offset in _DECODE if needs.decode else _PREFILL.get(needs.device, _PREFILL["cpu"]):
        if Feature.DOCUMENTS in needs.features:
            kv_length, q_offset = q_length, 0
        case = Case(
            features=needs.features & ~Feature.DROPOUT,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            num_heads=group * num_kv_heads,
            num_kv_heads=num_kv_heads,
            qk_head_dim=needs.qk_head_dim,
            v_head_dim=needs.v_head_dim,
            dtype=needs.dtype,
            device=needs.device,
        )
        if case not in found:
            found.append(case)
    return found


def _recording(needs: Needs) -> bool:
    return torch.compiler.is_compiling() or (needs.device == "cuda" and torch.cuda.is_current_stream_capturing())


def _outcome(backend: Backend, needs: Needs) -> ProofError | None:
    devices = [torch.cuda.current_device()] if needs.device == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        for case in cases_of(needs):
            try:
                check(backend, case)
            except ProofError as failure:
                return failure
            except Exception as error:  # noqa: BLE001 - kept, and raised again at every use
                return ProofError(f"backend {backend.name!r} cannot run: {error!r}", where=str(case))
    return None
