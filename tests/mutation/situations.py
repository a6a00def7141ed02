"""Small attentions and what they must give: the expectations are computed number by number, outside the project."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from adapter.backends.call import AttentionCall, Visibility
from tests.backends import loops

SINKS = (2.0, 4.5, -1.0, 3.0)


@dataclass(frozen=True)
class Situation:
    """One attention: a mask by fields and, said again, as a predicate over (batch row, query and key positions)."""

    q_length: int
    kv_length: int
    fields: dict[str, Any]
    sees: Any
    batch: int = 2
    per_token: bool = False
    softcap: float | None = None
    biased: bool = False
    dim: int = 8

    @property
    def offset(self):
        return self.fields.get("q_offset", 0)


PADDING = torch.arange(12)[None] >= torch.tensor([[3], [0]])
DOCUMENTS = torch.tensor([[0] * 5 + [1] * 7, [0] * 9 + [1] * 3])
START = torch.tensor([1, 3])
SITUATIONS = {
    "causal": Situation(12, 12, {"right": 0}, lambda b, q, k: k <= q),
    "decode": Situation(1, 12, {"right": 0, "q_offset": 11}, lambda b, q, k: k <= q),
    "window": Situation(70, 70, {"right": 0, "left": 4}, lambda b, q, k: q - 5 < k <= q, batch=1),
    "window decode": Situation(1, 12, {"right": 0, "left": 4, "q_offset": 11}, lambda b, q, k: q - 5 < k <= q),
    "tight window": Situation(12, 12, {"right": 0, "left": 10}, lambda b, q, k: q - 11 < k <= q),
    "window per token": Situation(
        70, 70, {"right": 0, "left": 4}, lambda b, q, k: q - 5 < k <= q, batch=1, per_token=True
    ),
    "forward window": Situation(12, 12, {"left": 2, "right": 10}, lambda b, q, k: q - 2 <= k <= q + 10),
    "padding": Situation(12, 12, {"right": 0, "padding": PADDING}, lambda b, q, k: k <= q and (b or k >= 3)),
    "window over padding": Situation(
        70, 70, {"right": 0, "left": 4, "padding": torch.arange(70)[None] % 11 != 7},
        lambda b, q, k: q - 5 < k <= q and k % 11 != 7, batch=1,
    ),
    "documents": Situation(
        12, 12, {"right": 0, "documents": DOCUMENTS}, lambda b, q, k: k <= q and DOCUMENTS[b, q] == DOCUMENTS[b, k]
    ),
    "chunks": Situation(
        12, 12, {"right": 0, "chunk_size": 4, "chunk_start": START},
        lambda b, q, k: k <= q and (q - START[b]) // 4 == (k - START[b]) // 4,
    ),
    "dense": Situation(
        12, 12, {"dense": torch.arange(12)[None, None, :, None] >= torch.arange(12) * 2}, lambda b, q, k: q >= 2 * k
    ),
    "chunked prefill": Situation(5, 12, {"right": 0, "q_offset": 7}, lambda b, q, k: k <= q),
    "evicted keys": Situation(
        5, 9, {"right": 0, "left": 6, "q_offset": 7, "kv_offset": 3}, lambda b, q, k: q - 7 < k <= q and k >= 3
    ),
    "unwritten slots": Situation(2, 12, {"right": 0, "q_offset": 4}, lambda b, q, k: k <= q),
    "per token": Situation(5, 12, {"right": 0, "q_offset": 7}, lambda b, q, k: k <= q, per_token=True),
    "cap and bias": Situation(12, 12, {"right": 0}, lambda b, q, k: k <= q, softcap=1.5, biased=True),
    "bias": Situation(12, 12, {"right": 0}, lambda b, q, k: k <= q, biased=True),
}  # fmt: skip


@functools.cache
def inputs_of(name):
    """Query, key, value, sinks, bias and the gradient that comes from above, in fp64."""
    s, make = SITUATIONS[name], torch.Generator().manual_seed(5)
    heads = 4

    def normal(*shape):
        return torch.randn(shape, generator=make, dtype=torch.float64)

    q, k = normal(s.batch, heads, s.q_length, s.dim), normal(s.batch, 2, s.kv_length, s.dim)
    v, up = normal(s.batch, 2, s.kv_length, s.dim), normal(s.batch, s.q_length, heads, s.dim)
    sinks = torch.tensor(SINKS, dtype=torch.float64)
    if s.per_token:
        sinks = sinks[None, :, None, None] + normal(s.batch, heads, s.q_length, 1)
    bias = normal(1, heads, s.q_length, s.kv_length) if s.biased else None
    return q, k, v, sinks, bias, up


@functools.cache
def expected_of(name):
    """Output and gradients by sums over single numbers."""
    s, (q, k, v, sinks, bias, up) = SITUATIONS[name], inputs_of(name)
    shape, start = (s.batch, 4, s.q_length, s.kv_length), s.fields.get("kv_offset", 0)
    visible = np.zeros(shape, dtype=bool)
    for b, i, j in np.ndindex(s.batch, s.q_length, s.kv_length):
        visible[b, :, i, j] = bool(s.sees(b, i + s.offset, j + start))
    wide = (sinks[..., 0] if s.per_token else sinks[None, :, None]).expand(shape[:3]).numpy()
    given = [t.numpy() for t in (q, k, v)] + [0.4, visible, wide]
    output = loops.attend(*given, s.softcap, None if bias is None else bias.expand(shape).numpy())
    if s.biased:
        return torch.from_numpy(output), None
    dq, dk, dv, ds = (torch.from_numpy(g) for g in loops.gradients(*given, up.numpy()))
    return torch.from_numpy(output), (dq, dk, dv, ds[..., None] if s.per_token else ds.sum((0, 2)))


def call_of(name, dtype=torch.float64):
    s, (q, k, v, sinks, bias, _) = SITUATIONS[name], inputs_of(name)
    q, k, v, sinks = (t.to(dtype, copy=True).requires_grad_(not s.biased) for t in (q, k, v, sinks))
    visibility = Visibility(s.batch, s.q_length, s.kv_length, **s.fields)
    return AttentionCall(q, k, v, 0.4, visibility, sinks=sinks, bias=bias, softcap=s.softcap)
