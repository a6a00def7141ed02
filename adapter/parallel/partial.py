"""Attention over some of the keys with its log-sum-exp, on the backends that give one."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from torch import Tensor

from ..backends import registry, sdpa_math
from ..backends.call import AttentionCall
from ..backends.capability import Needs
from ..errors import ParallelError


class Partial(Protocol):
    """One backend's way to attend to a part of the keys. The sink of a call is not looked at."""

    name: str

    def forward(self, call: AttentionCall) -> tuple[Tensor, Tensor]:
        """Output [batch, q_length, num_heads, v_head_dim] and log-sum-exp [batch, num_heads, q_length].

        Where a query sees none of the keys they are 0 and -inf.
        """

    def backward(self, call: AttentionCall, grad: Tensor, output: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of query, key and value, for weights `exp(logits - lse)`, `lse` being that of all keys and the
        sink, and `output` the output over all of them."""


class SdpaPartial:
    """The fused attention ops of torch."""

    name = "sdpa"

    def forward(self, call: AttentionCall) -> tuple[Tensor, Tensor]:
        """See Partial."""
        return sdpa_math.partial(call)

    def backward(self, call: AttentionCall, grad: Tensor, output: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See Partial."""
        dq, dk, dv, _ = sdpa_math.backward(replace(call, sinks=None), grad, output, lse)
        return dq, dk, dv


class TritonPartial:
    """The project's Triton kernels."""

    name = "triton"

    def forward(self, call: AttentionCall) -> tuple[Tensor, Tensor]:
        """See Partial."""
        from ..kernels import prefill
        from ..kernels.masking import Masking

        batch, num_heads, q_length, _ = call.query.shape
        masking = Masking.of(call.visibility).expanded(batch, num_heads, q_length, call.key.shape[2])
        return prefill.attend(call.query, call.key, call.value, None, call.scale, call.softcap, masking)

    def backward(self, call: AttentionCall, grad: Tensor, output: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See Partial."""
        from ..kernels import backward
        from ..kernels.masking import Masking

        batch, num_heads, q_length, _ = call.query.shape
        masking = Masking.of(call.visibility).expanded(batch, num_heads, q_length, call.key.shape[2])
        dq, dk, dv, _ = backward.gradients(
            call.query, call.key, call.value, None, output, lse, grad, None, call.scale, call.softcap, masking
        )
        return dq, dk, dv


_PARTIALS: dict[str, Partial] = {"triton": TritonPartial(), "sdpa": SdpaPartial()}
"""In the order in which 'auto' tries them."""


def partial_for(backend: str, needs: Needs, where: str = "") -> Partial:
    """What computes the blocks of a ring for `needs`: the named backend or an error; for 'auto' the first that can.

    Raises:
        ParallelError: the backend gives no log-sum-exp, or cannot serve the needs; each reason is listed.
        ProofError: the backend computes something else than the reference on this machine.
    """
    reasons: dict[str, list[str]] = {}
    for name in _PARTIALS if backend == registry.AUTO else (backend,):
        if name not in _PARTIALS:
            reasons[name] = ["it returns no log-sum-exp, and a ring merges its blocks by it"]
            continue
        reasons[name] = registry.refusals(name, needs, asked_for=backend != registry.AUTO)
        if not reasons[name]:
            registry.select(name, needs)
            return _PARTIALS[name]
    listing = "; ".join(f"{name}: {', '.join(found)}" for name, found in reasons.items())
    raise ParallelError(
        f"no backend can run the blocks of a ring here ({listing})",
        where=where,
        why="running them on something else would be a fallback that nobody asked for",
        fix='use method="ulysses", which runs on every backend',
    )
