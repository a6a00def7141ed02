"""Plain torch matmul and softmax in the dtype of the model: every feature, memory of q_length x kv_length."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .call import Attended, AttentionCall
from .capability import Capability, Feature


class Eager:
    """What transformers calls eager attention, with the softmax in fp32 and the sink unrounded."""

    name = "eager"
    capability = Capability(
        devices=frozenset({"cpu", "cuda", "mps", "xpu"}),
        dtypes=frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64}),
        features=~Feature.NONE,
    )

    def unavailable(self) -> str | None:
        """Always available."""
        return None

    def attend(self, call: AttentionCall) -> Attended:
        """Compute one call. A value row that only a tensor hides must be finite; what integers exclude is not read."""
        q_length, kv_length = call.query.shape[2], call.key.shape[2]
        start, stop = call.visibility.kv_range()
        call = call.narrow(0, q_length, start, stop)
        group = call.query.shape[1] // call.key.shape[1]
        key, value = (t.repeat_interleave(group, dim=1) for t in (call.key, call.value))
        weights = _weights(call, call.query @ key.transpose(2, 3) * call.scale)
        output = (F.dropout(weights, call.dropout) @ value).transpose(1, 2).contiguous()
        return Attended(output, F.pad(weights, (start, kv_length - stop)) if call.need_weights else None)


def _weights(call: AttentionCall, logits: Tensor) -> Tensor:
    if call.softcap is not None:
        logits = call.softcap * torch.tanh(logits / call.softcap)
    if call.bias is not None:
        logits = logits + call.bias.to(logits.dtype)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    visible = call.visibility.to_bool(logits.device)
    if visible is not None:
        logits = logits.masked_fill(~visible, float("-inf"))
    hidden = logits == float("-inf")
    # a finite floor keeps the softmax of a row that sees nothing, and its gradient, free of NaN
    logits = logits.masked_fill(hidden, torch.finfo(logits.dtype).min)
    if call.sinks is not None:
        sinks = call.sinks[:, None, None] if call.sinks.dim() == 1 else call.sinks
        logits = torch.cat([logits, sinks.to(logits.dtype).expand(*logits.shape[:3], 1)], dim=3)
    weights = torch.softmax(logits, dim=3)[..., : hidden.shape[3]]
    return weights.masked_fill(hidden, 0).to(call.query.dtype)


BACKEND = Eager()
