"""What a call gives at any sink, from its definition in fp64: output = sinkless output * sigmoid(lse - sink)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..backends.call import AttentionCall


@dataclass(frozen=True, eq=False)
class Analytic:
    """A call without its sink.

    Args:
        output: [batch, q_length, num_heads, v_head_dim], softmax over the keys alone; 0 where no key is visible.
        lse: [batch, num_heads, q_length], log-sum-exp of the logits; -inf where no key is visible.
    """

    output: Tensor
    lse: Tensor

    def at(self, sink: Tensor) -> Tensor:
        """The output with a sink, [num_heads] or broadcastable to [batch, num_heads, q_length, 1]."""
        keys = torch.sigmoid(self.lse - rows(sink).double())
        return self.output * keys.transpose(1, 2)[..., None]

    def level(self, sink: Tensor) -> Tensor:
        """`sink`, but the log-sum-exp of a head's logits where its sink is too low or too high for a change to show."""
        finite = self.lse.isfinite()
        lse = torch.where(finite, self.lse, torch.nan).transpose(0, 1).flatten(1).nanmedian(dim=1).values.nan_to_num()
        share = torch.where(finite, torch.sigmoid(rows(sink).double() - self.lse), torch.nan)
        share = share.transpose(0, 1).flatten(1).nanmedian(dim=1).values
        keep = (share >= 0.05) & (share <= 0.95)
        shape = (-1,) if sink.dim() == 1 else (1, -1, 1, 1)
        return torch.where(keep.view(shape), sink.double(), lse.view(shape)).to(sink.dtype)


def rows(sink: Tensor) -> Tensor:
    """The sink broadcastable to [batch, num_heads, q_length]."""
    return sink.view(1, -1, 1) if sink.dim() == 1 else sink[..., 0]


def solve(call: AttentionCall) -> Analytic:
    """The fp64 output and log-sum-exp of a call, whatever its sink is."""
    group = call.query.shape[1] // call.key.shape[1]
    key, value = (t.double().repeat_interleave(group, dim=1) for t in (call.key, call.value))
    logits = call.scale * call.query.double() @ key.transpose(2, 3)
    if call.softcap is not None:
        logits = call.softcap * torch.tanh(logits / call.softcap)
    if call.bias is not None:
        logits = logits + call.bias.double()
    visible = call.visibility.to_bool(call.query.device)
    if visible is not None:
        logits = logits.masked_fill(~visible, float("-inf"))
    lse = logits.logsumexp(dim=3)
    weights = torch.exp(logits - torch.where(lse.isfinite(), lse, 0.0)[..., None])
    return Analytic((weights @ value).transpose(1, 2), lse)
