"""Calls that the tests of the backends share."""

from __future__ import annotations

import torch

from adapter.backends import registry
from adapter.backends.call import AttentionCall, Visibility
from adapter.backends.contract import Case

CPU_BACKENDS = ("reference", "eager", "sdpa")


def attend(name: str, call: AttentionCall) -> torch.Tensor:
    """The output of one backend."""
    return registry.get(name).attend(call).output


def make(
    q_length: int,
    kv_length: int,
    *,
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 8,
    batch: int = 1,
    dtype: torch.dtype = torch.float64,
    sinks: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    grad: bool = False,
    **mask: object,
) -> AttentionCall:
    """A random call whose queries are the last ones of the keys, unless the mask says otherwise."""
    mask.setdefault("q_offset", kv_length - q_length)
    q, k, v = (
        torch.randn(batch, h, n, dim, dtype=dtype, requires_grad=grad)
        for h, n in ((heads, q_length), (kv_heads, kv_length), (kv_heads, kv_length))
    )
    visibility = Visibility(batch, q_length, kv_length, **mask)  # type: ignore[arg-type]
    return AttentionCall(q, k, v, dim**-0.5, visibility, sinks=sinks, bias=bias)


__all__ = ["CPU_BACKENDS", "Case", "attend", "make"]
