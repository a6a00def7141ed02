"""One attention call as the backends see it: tensors, scale, sink, and which keys each query may see."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Visibility:
    """Which keys each query may see, as meaning rather than as a q_length x kv_length tensor.

    Query i stands at position `q_offset + i`, key j at position `kv_offset + j`. A key is visible when every field that is
    set allows it.

    Args:
        batch_size: rows of the batch.
        q_length: number of queries.
        kv_length: number of keys, unwritten slots of a static cache included.
        q_offset: position of the first query; an int64 scalar tensor when a static cache keeps it on the device.
        kv_offset: position of the first key.
        left: greatest distance backwards, `query - key <= left`; a window of W tokens that counts the query itself has
            left = W - 1. None is unlimited.
        right: greatest distance forwards, `key - query <= right`; 0 is causal. None is unlimited.
        chunk_size: query and key must lie in the same chunk of this many positions.
        chunk_start: [batch_size] int64, the position where chunks begin counting (the left padding); None is zero.
        documents: [batch_size, kv_length] integers; query and key must carry the same one. Needs q_length == kv_length.
        padding: [batch_size, kv_length] bool, True where the key is real.
        dense: bool, broadcastable to [batch_size, num_heads, q_length, kv_length], True where visible: what has no other name.
    """

    batch_size: int
    q_length: int
    kv_length: int
    q_offset: int | Tensor = 0
    kv_offset: int = 0
    left: int | None = None
    right: int | None = None
    chunk_size: int | None = None
    chunk_start: Tensor | None = None
    documents: Tensor | None = None
    padding: Tensor | None = None
    dense: Tensor | None = None

    @property
    def is_full(self) -> bool:
        """True when every query sees every key."""
        fields = (self.left, self.right, self.chunk_size, self.documents, self.padding, self.dense)
        return all(f is None for f in fields)

    def with_(self, **changes: object) -> Visibility:
        """A copy with some fields changed."""
        return replace(self, **changes)  # type: ignore[arg-type]

    def to_bool(self, device: torch.device) -> Tensor | None:
        """The mask as a bool tensor broadcastable to [batch_size, num_heads, q_length, kv_length]; None when all is visible."""
        if self.is_full:
            return None
        q = torch.arange(self.q_length, device=device)[:, None] + self.q_offset
        k = torch.arange(self.kv_length, device=device)[None, :] + self.kv_offset
        visible = torch.ones(1, 1, self.q_length, self.kv_length, dtype=torch.bool, device=device)
        if self.left is not None:
            visible = visible & (q - k <= self.left)
        if self.right is not None:
            visible = visible & (k - q <= self.right)
        if self.chunk_size is not None:
            start = 0 if self.chunk_start is None else self.chunk_start.to(device)[:, None, None, None]
            visible = visible & ((q - start) // self.chunk_size == (k - start) // self.chunk_size)
        if self.documents is not None:
            documents = self.documents.to(device)
            visible = visible & (documents[:, None, :, None] == documents[:, None, None, :])
        if self.padding is not None:
            visible = visible & self.padding.to(device)[:, None, None, :]
        if self.dense is not None:
            visible = visible & self.dense.to(device)
        return visible


@dataclass(eq=False)
class AttentionCall:
    """Everything that one attention needs. Logits are `softcap(scale * query @ key) + bias`; the sink joins them untouched.

    Args:
        query: [batch, num_heads, q_length, qk_head_dim].
        key: [batch, num_kv_heads, kv_length, qk_head_dim].
        value: [batch, num_kv_heads, kv_length, v_head_dim].
        scale: factor of query @ key.
        visibility: which keys each query may see.
        sinks: [num_heads], or [batch, num_heads, q_length, 1], any floating dtype; None for no sink.
        bias: additive, broadcastable to [batch, num_heads, q_length, kv_length].
        softcap: cap * tanh(logit / cap), before the bias; None for none.
        dropout: probability, on the weights.
        need_weights: the caller wants the attention weights.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    visibility: Visibility
    sinks: Tensor | None = None
    bias: Tensor | None = None
    softcap: float | None = None
    dropout: float = 0.0
    need_weights: bool = False


@dataclass(eq=False)
class Attended:
    """The result: `output` [batch, q_length, num_heads, v_head_dim]; `weights` [batch, num_heads, q_length, kv_length], sink
    column left out, when they were asked for. A query with no visible key has output 0."""

    output: Tensor
    weights: Tensor | None = None
