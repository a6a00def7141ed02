"""The fused attention ops of torch with the sink joined exactly, forward and backward."""

from __future__ import annotations

import torch

from . import sdpa_math, sdpa_op
from .call import Attended, AttentionCall
from .capability import Capability, Feature, Needs

_MASKED = (
    Feature.WINDOW | Feature.CHUNK | Feature.DOCUMENTS | Feature.PADDING | Feature.DENSE_MASK | Feature.BIAS
)  # fmt: skip


def _combination(needs: Needs) -> str | None:
    """Found on an H200: no double through the fused CUDA ops, and an illegal read in their backward under a mask."""
    if needs.device != "cuda":
        return None
    if needs.dtype is torch.float64:
        return "float64 on cuda"
    if Feature.BACKWARD in needs.features and needs.features & _MASKED:
        return "backward under a mask on cuda"
    return None


class Sdpa:
    """Memory linear in length; a window costs q_length x window. What a tensor hides must still be finite in key and
    value; keys outside the causal bound or the window are not read."""

    name = "sdpa"
    capability = Capability(
        devices=frozenset({"cpu", "cuda"}),
        dtypes=frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64}),
        combination=_combination,
        features=~(Feature.SOFTCAP | Feature.DROPOUT | Feature.WEIGHTS | Feature.BIAS_GRADIENT),
    )

    def unavailable(self) -> str | None:
        """None; the ops are part of every torch that the project accepts."""
        return None

    def attend(self, call: AttentionCall) -> Attended:
        """Compute one call; the second derivative raises BackendError."""
        tensors = (call.query, call.key, call.value, call.sinks)
        traced = torch.compiler.is_compiling()
        if traced or (torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)):
            return Attended(sdpa_op.attend(*sdpa_op.arguments(call))[0])
        return Attended(sdpa_math.forward(call)[0])


BACKEND = Sdpa()
