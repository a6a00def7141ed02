"""The specification: attention with a sink written as its definition, in fp32 or fp64, differentiable throughout."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .call import Attended, AttentionCall
from .capability import Capability, Feature


class Reference:
    """Softmax over the keys and one extra column, the sink, whose value is zero. Half precision is computed in fp32."""

    name = "reference"
    capability = Capability(
        devices=frozenset({"cpu", "cuda", "mps", "xpu"}),
        dtypes=frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64}),
        features=~Feature.NONE,
    )

    def unavailable(self) -> str | None:
        """Always available."""
        return None

    def attend(self, call: AttentionCall) -> Attended:
        """weights = exp(logit) / (sum exp(logit) + exp(sink)) over the visible keys; zero where a query sees none."""
        dtype = torch.float64 if call.query.dtype == torch.float64 else torch.float32
        group = call.query.shape[1] // call.key.shape[1]
        query = call.query.to(dtype)
        key, value = (t.to(dtype).repeat_interleave(group, dim=1) for t in (call.key, call.value))
        visible = call.visibility.to_bool(query.device)
        if visible is not None:
            # rows that no query sees may hold anything, NaN included: the unwritten slots of a cache
            unseen = ~visible.expand(*query.shape[:3], key.shape[2]).any(dim=2)[..., None]
            key, value = key.masked_fill(unseen, 0), value.masked_fill(unseen, 0)
        logits = call.scale * query @ key.transpose(2, 3)
        if call.softcap is not None:
            logits = call.softcap * torch.tanh(logits / call.softcap)
        if call.bias is not None:
            logits = logits + call.bias.to(dtype)
        if visible is not None:
            logits = logits.masked_fill(~visible, float("-inf"))
        weights = _softmax(torch.cat([logits, _sink_column(call, dtype)], dim=3))[..., :-1]
        output = (F.dropout(weights, call.dropout) @ value).transpose(1, 2).contiguous()
        return Attended(output.to(call.query.dtype), weights.to(call.query.dtype) if call.need_weights else None)


def _softmax(columns: Tensor) -> Tensor:
    top = columns.detach().amax(dim=3, keepdim=True)
    powers = torch.exp(columns - top.masked_fill(top == float("-inf"), 0))
    total = powers.sum(dim=3, keepdim=True)
    return powers / total.masked_fill(total == 0, 1)


def _sink_column(call: AttentionCall, dtype: torch.dtype) -> Tensor:
    if call.sinks is None:
        return call.query.new_full((*call.query.shape[:3], 1), float("-inf"), dtype=dtype)
    sinks = call.sinks[:, None, None] if call.sinks.dim() == 1 else call.sinks
    return sinks.to(dtype).expand(*call.query.shape[:3], 1)


BACKEND = Reference()
