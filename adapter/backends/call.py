"""One attention call as the backends see it: tensors, scale, sink, and which keys each query may see."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Visibility:
    """Which keys each query may see, as meaning rather than as a q_length x kv_length tensor.

    Query i stands at position `q_offset + i`, key j at position `kv_offset + j`. A key is visible when every field that
    is set allows it.

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
        documents: [batch_size, kv_length] integers; query and key must carry the same one. Needs
            q_length == kv_length unless query_documents is set.
        query_documents: [batch_size, q_length], the documents of the queries; None when they are those of the keys.
        padding: [batch_size, kv_length] bool, True where the key is real.
        dense: bool, broadcastable to [batch_size, num_heads, q_length, kv_length], True where visible: what has no
            other name.
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
    query_documents: Tensor | None = None
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

    def kv_range(self, q_start: int = 0, q_stop: int | None = None) -> tuple[int, int]:
        """Keys [start, stop) that hold all that the queries [q_start, q_stop) may see by the integer fields."""
        if isinstance(self.q_offset, Tensor):
            return 0, self.kv_length
        first = self.q_offset - self.kv_offset + q_start
        last = self.q_offset - self.kv_offset + (self.q_length if q_stop is None else q_stop) - 1
        reach = [d for d in (self.left, self._reach(first, backwards=True)) if d is not None]
        start = max([0, *(first - d for d in reach)])
        reach = [d for d in (self.right, self._reach(last, backwards=False)) if d is not None]
        stop = min([self.kv_length, *(last + d + 1 for d in reach)])
        return min(start, self.kv_length), max(min(start, self.kv_length), stop)

    def _reach(self, index: int, *, backwards: bool) -> int | None:
        """How far a query at key index `index` reaches in its chunk; at most, where the chunk depends on the row."""
        if self.chunk_size is None:
            return None
        if self.chunk_start is not None:
            return self.chunk_size - 1
        behind = (index + self.kv_offset) % self.chunk_size
        return behind if backwards else self.chunk_size - 1 - behind

    def narrow(self, q_start: int, q_stop: int, kv_start: int, kv_stop: int) -> Visibility:
        """What the queries [q_start, q_stop) see of the keys [kv_start, kv_stop)."""
        if (q_start, q_stop, kv_start, kv_stop) == (0, self.q_length, 0, self.kv_length):
            return self
        documents, queries = self.documents, self.query_documents
        queries = documents if queries is None else queries
        return replace(
            self,
            q_length=q_stop - q_start,
            kv_length=kv_stop - kv_start,
            q_offset=self.q_offset + q_start,
            kv_offset=self.kv_offset + kv_start,
            documents=None if documents is None else documents[:, kv_start:kv_stop],
            query_documents=None if queries is None else queries[:, q_start:q_stop],
            padding=None if self.padding is None else self.padding[:, kv_start:kv_stop],
            dense=_cut(_cut(self.dense, -2, q_start, q_stop), -1, kv_start, kv_stop),
        )

    def to_bool(self, device: torch.device) -> Tensor | None:
        """The mask, bool, broadcastable to [batch_size, num_heads, q_length, kv_length]; None when all is visible."""
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
            queries = self.documents if self.query_documents is None else self.query_documents
            visible = visible & (queries.to(device)[:, None, :, None] == self.documents.to(device)[:, None, None, :])
        if self.padding is not None:
            visible = visible & self.padding.to(device)[:, None, None, :]
        if self.dense is not None:
            visible = visible & self.dense.to(device)
        return visible


@dataclass(eq=False)
class AttentionCall:
    """Everything that one attention needs. Logits are `softcap(scale * query @ key) + bias`; the sink joins untouched.

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

    def narrow(self, q_start: int, q_stop: int, kv_start: int, kv_stop: int) -> AttentionCall:
        """The call of the queries [q_start, q_stop) with the keys [kv_start, kv_stop)."""
        if (q_start, q_stop, kv_start, kv_stop) == (0, self.query.shape[2], 0, self.key.shape[2]):
            return self
        sinks = self.sinks
        return replace(
            self,
            query=self.query[:, :, q_start:q_stop],
            key=self.key[:, :, kv_start:kv_stop],
            value=self.value[:, :, kv_start:kv_stop],
            visibility=self.visibility.narrow(q_start, q_stop, kv_start, kv_stop),
            sinks=sinks if sinks is None or sinks.dim() == 1 else sinks[:, :, q_start:q_stop],
            bias=_cut(_cut(self.bias, -2, q_start, q_stop), -1, kv_start, kv_stop),
        )


@dataclass(eq=False)
class Attended:
    """The result of a call. A query with no visible key has output 0.

    Args:
        output: [batch, q_length, num_heads, v_head_dim], dtype of the query.
        weights: [batch, num_heads, q_length, kv_length] without the sink's column, when they were asked for.
    """

    output: Tensor
    weights: Tensor | None = None


def _cut(tensor: Tensor | None, dim: int, start: int, stop: int) -> Tensor | None:
    """A slice of a broadcastable tensor; a dimension that broadcasts stays as it is."""
    if tensor is None or tensor.dim() < -dim or tensor.shape[dim] == 1:
        return tensor
    return tensor.narrow(dim, start, stop - start)
