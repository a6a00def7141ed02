"""Which keys each query sees, in the form in which every kernel takes it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..backends.call import Visibility
from .tiles import UNLIMITED

_NARROW = 1024


@dataclass(frozen=True, eq=False)
class Masking:
    """A Visibility and a bias as kernel arguments.

    Args:
        q_origin: position of the first query, without the part that `origin` holds.
        origin: int64 scalar or [batch] on the device, added to `q_origin`; None for nothing.
        kv_origin: position of the first key.
        back: greatest distance `query - key`; UNLIMITED for none.
        ahead: greatest distance `key - query`; UNLIMITED for none.
        chunk: positions in a chunk; 0 for no chunks.
        chunk_start: [batch] int64, where chunks begin counting; None for 0.
        documents: [batch, kv_length] integers, those of the keys; None for one document.
        query_documents: [batch, q_length] integers; None when `documents` is.
        padding: [batch, kv_length] bool, True where real; None where all are.
        dense: bool, expanded to [batch, num_heads, q_length, kv_length]; None for no mask.
        bias: floating, expanded to the same shape, added to the logits; None for no bias.
    """

    q_origin: int = 0
    origin: Tensor | None = None
    kv_origin: int = 0
    back: int = UNLIMITED
    ahead: int = UNLIMITED
    chunk: int = 0
    chunk_start: Tensor | None = None
    documents: Tensor | None = None
    query_documents: Tensor | None = None
    padding: Tensor | None = None
    dense: Tensor | None = None
    bias: Tensor | None = None

    @classmethod
    def of(cls, visibility: Visibility, bias: Tensor | None = None) -> Masking:
        """Read the arguments off a Visibility."""
        offset = visibility.q_offset
        on_device = isinstance(offset, Tensor)
        return cls(
            q_origin=0 if isinstance(offset, Tensor) else offset,
            origin=offset if on_device else None,  # type: ignore[arg-type]
            kv_origin=visibility.kv_offset,
            back=_distance(visibility.left),
            ahead=_distance(visibility.right),
            chunk=visibility.chunk_size or 0,
            chunk_start=visibility.chunk_start,
            documents=visibility.documents,
            query_documents=visibility.documents if visibility.query_documents is None else visibility.query_documents,
            padding=visibility.padding,
            dense=visibility.dense,
            bias=bias,
        )

    @property
    def is_windowed(self) -> bool:
        """True when a row sees so few keys that the edges weigh more than the middle."""
        return self.back + self.ahead < _NARROW

    @property
    def has_extents(self) -> bool:
        """True when only the tensors of the call say which tiles can be visible."""
        return self.documents is not None or self.padding is not None

    @property
    def is_dense(self) -> bool:
        """True when every tile has to be read from a mask or a bias."""
        return self.dense is not None or self.bias is not None

    def may_hide_garbage(self, q_length: int, kv_length: int) -> bool:
        """True when hidden keys may be slots that nothing was ever written to."""
        hiding = (self.origin, self.padding, self.dense)
        return any(t is not None for t in hiding) or self.q_origin - self.kv_origin + q_length < kv_length

    def expanded(self, batch: int, num_heads: int, q_length: int, kv_length: int) -> Masking:
        """The same with every tensor on its full shape (by strides, without a copy), contiguous where kernels need
        it."""
        shape = (batch, num_heads, q_length, kv_length)
        if self.chunk_start is None and not self.has_extents and not self.is_dense:
            return self
        return Masking(
            self.q_origin,
            self.origin,
            self.kv_origin,
            self.back,
            self.ahead,
            self.chunk,
            None if self.chunk_start is None else self.chunk_start.expand(batch).contiguous(),
            None if self.documents is None else self.documents.expand(batch, kv_length).contiguous(),
            None if self.query_documents is None else self.query_documents.expand(batch, q_length).contiguous(),
            None if self.padding is None else self.padding.expand(batch, kv_length).contiguous(),
            None if self.dense is None else self.dense.expand(shape),
            None if self.bias is None else self.bias.expand(shape),
        )


def _distance(limit: int | None) -> int:
    return UNLIMITED if limit is None else max(-UNLIMITED, min(limit, UNLIMITED))


def bytes_of(mask: Tensor | None) -> Tensor | None:
    """A bool tensor as the bytes that kernels load."""
    return None if mask is None else mask.view(torch.uint8)


def strides_of(tensor: Tensor | None) -> tuple[int, ...]:
    """The four strides of a mask or a bias; zeros where there is none."""
    return (0, 0, 0, 0) if tensor is None else tensor.stride()


def sink_strides(sinks: Tensor | None) -> tuple[int, ...]:
    """Strides of the sinks over batch, head and query."""
    if sinks is None:
        return 0, 0, 0
    return (0, sinks.stride(0), 0) if sinks.dim() == 1 else sinks.stride()[:3]


def origin_stride(origin: Tensor | None) -> int:
    """1 when the batch's rows have origins of their own, else 0."""
    return 1 if origin is not None and origin.dim() > 0 and origin.numel() > 1 else 0
