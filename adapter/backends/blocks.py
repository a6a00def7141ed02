"""Cutting a call into blocks of queries and the keys they see, so that no q_length x kv_length mask is needed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .call import AttentionCall, Visibility

_ROWS = 256
_WINDOW_ROWS = 32
_PACKED_ROWS = 64


@dataclass(frozen=True)
class Block:
    """The queries [q_start, q_stop) and the keys [kv_start, kv_stop), which hold all that those queries see."""

    q_start: int
    q_stop: int
    kv_start: int
    kv_stop: int


def simplify(visibility: Visibility) -> Visibility:
    """The same visibility without the fields that hide nothing; a position kept in CPU memory becomes an integer."""
    v = visibility
    if isinstance(v.q_offset, Tensor):
        return v.with_(q_offset=int(v.q_offset)) if v.q_offset.device.type == "cpu" else v
    ahead = v.q_offset - v.kv_offset
    if v.left is not None and v.left >= ahead + v.q_length - 1:
        v = v.with_(left=None)
    if v.right is not None and v.right >= v.kv_length - 1 - ahead:
        v = v.with_(right=None)
    return v


def is_plain_causal(call: AttentionCall) -> bool:
    """True when query i sees exactly the keys up to i and there is no bias: what the ops do without a mask."""
    v = call.visibility
    if isinstance(v.q_offset, Tensor) or call.bias is not None or v.right != 0:
        return False
    return v.with_(right=None).is_full and v.q_offset == v.kv_offset and v.q_length <= v.kv_length


def blocks(call: AttentionCall) -> Iterator[Block]:
    """The blocks of a call, in the order of the queries; one that sees no key is left out."""
    v = call.visibility
    rows = v.q_length if v.is_full and call.bias is None else _rows(v)
    for start in range(0, v.q_length, rows):
        stop = min(start + rows, v.q_length)
        kv_start, kv_stop = v.kv_range(start, stop)
        if kv_stop > kv_start:
            yield Block(start, stop, kv_start, kv_stop)


def _rows(v: Visibility) -> int:
    """Queries per block: half a window, so that at most a third of the keys that a block reads are wasted."""
    reach = min((d for d in (v.left, v.chunk_size) if d is not None), default=_ROWS)
    return max(_WINDOW_ROWS, min(_ROWS, (reach + 1) // 2)) if reach < _ROWS else _ROWS


def seen_columns(visible: Tensor) -> tuple[int, int]:
    """Slice bounds of the columns that any row sees. Reads the values, so only for a mask on the CPU."""
    seen = visible.flatten(0, -2).any(dim=0).nonzero()
    return (int(seen[0]), int(seen[-1]) + 1) if seen.numel() else (0, 0)


def is_packed(call: AttentionCall) -> bool:
    """Whether the query heads of a kv head are better laid out as rows: short queries, several heads per kv head."""
    _, num_heads, rows, _ = call.query.shape
    return num_heads > call.key.shape[1] and rows <= _PACKED_ROWS


def pack(tensor: Tensor, num_kv_heads: int) -> Tensor:
    """[batch, num_heads, rows, ...] -> [batch, num_kv_heads, group * rows, ...]."""
    batch, num_heads, rows = tensor.shape[:3]
    return tensor.reshape(batch, num_kv_heads, num_heads // num_kv_heads * rows, *tensor.shape[3:])


def unpack(tensor: Tensor, num_heads: int) -> Tensor:
    """The inverse of `pack`."""
    batch, num_kv_heads, rows = tensor.shape[:3]
    return tensor.reshape(batch, num_heads, rows * num_kv_heads // num_heads, *tensor.shape[3:])


def pack_mask(mask: Tensor, num_heads: int, num_kv_heads: int) -> Tensor:
    """A 4-d mask that may broadcast over batch or heads, for packed rows."""
    if mask.shape[1] == 1:
        return mask.repeat(1, 1, num_heads // num_kv_heads, 1)
    return pack(mask, num_kv_heads)


def additive(visible: Tensor | None, bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """One additive mask from what is visible and the bias, each broadcastable to 4 dimensions."""
    if visible is None:
        return None if bias is None else bias.to(dtype)
    base = torch.zeros((), dtype=dtype, device=visible.device) if bias is None else bias.to(dtype)
    return torch.where(visible, base, float("-inf"))


def spread(mask: Tensor, rows: int, columns: int) -> Tensor:
    """A mask with 4 dimensions of which only the first two may broadcast."""
    mask = mask.reshape((1,) * (4 - mask.dim()) + tuple(mask.shape))
    return mask.expand(-1, -1, rows, columns)
