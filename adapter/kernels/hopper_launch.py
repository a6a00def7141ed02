"""Which calls the Hopper forward takes, and its launch."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from .launching import launch as run
from .masking import Masking, origin_stride, sink_strides
from .shapes import ceil_div
from .tuning import Tile

_LOG2E = math.log2(math.e)
_WIDTHS = (64, 128)
_CACHED_BYTES = 24 << 20


def accepts(query: Tensor, key: Tensor, value: Tensor, softcap: float | None, masking: Masking, tile: Tile) -> bool:
    """True when the call needs nothing but distances, and its tensors can be fetched tile by tile."""
    if not tile.gluon or softcap is not None or masking.chunk or masking.has_extents or masking.is_dense:
        return False
    if masking.may_hide_garbage(query.shape[2], key.shape[2]) or query.dtype not in (torch.float16, torch.bfloat16):
        return False
    if query.shape[3] not in _WIDTHS or value.shape[3] not in _WIDTHS or key.shape[2] < 1:
        return False
    group = query.shape[1] // key.shape[1]
    return not tile.packed or (group & (group - 1) == 0 and tile.rows % group == 0)


@functools.cache
def _layout(rank: int) -> object:
    from triton.experimental.gluon import language as gl

    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=rank)


def _descriptor(tensor: Tensor, shape: list[int], strides: list[int], block: list[int]) -> object:
    # `rows_ready` has checked what the constructor would: its checks cost a third of a small call.
    made = object.__new__(_descriptor_class())
    made.base, made.shape, made.strides, made.block_shape = tensor, shape, strides, block
    made.layout, made.padding, made.round_f32_to_tf32 = _layout(len(shape)), "zero", False
    return made


@functools.cache
def _descriptor_class() -> Any:
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    return TensorDescriptor


def _queries(query: Tensor, group: int, tile: Tile) -> object:
    """The query as [batch, kv heads, tokens, group, width] when packed, else as [batch, heads, 1, tokens, width]."""
    batch, heads, length, width = query.shape
    stride_b, stride_h, stride_t, _ = query.stride()
    if tile.packed:
        shape, strides = (
            [batch, heads // group, length, group, width],
            [stride_b, stride_h * group, stride_t, stride_h, 1],
        )
        return _descriptor(query, shape, strides, [1, 1, tile.rows // group, group, width])
    shape, strides = [batch, heads, 1, length, width], [stride_b, stride_h, stride_t, stride_t, 1]
    return _descriptor(query, shape, strides, [1, 1, 1, tile.rows, width])


def launch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scale: float,
    masking: Masking,
    tile: Tile,
) -> None:
    """Fill `out` and `lse`; arguments as in `prefill.attend`, for calls that `accepts` lets through."""
    from . import hopper

    batch, num_heads, q_length, width = query.shape
    kv_heads, kv_length, v_width = key.shape[1], key.shape[2], value.shape[3]
    group = num_heads // kv_heads
    heads, rows_per_token = (kv_heads, group) if tile.packed else (num_heads, 1)
    blocks = ceil_div(q_length * rows_per_token, tile.rows)
    fitting = max(1, _CACHED_BYTES // (kv_length * (width + v_width) * query.element_size()))
    adjacent = min(batch * heads, fitting * (group // rows_per_token))
    # fmt: off
    run(
        hopper.forward, (blocks * batch * heads, 1, 1),
        (_queries(query, group, tile),
         _descriptor(key, list(key.shape), list(key.stride()), [1, 1, tile.columns, width]),
         _descriptor(value, list(value.shape), list(value.stride()), [1, 1, tile.columns, v_width]),
         sinks, out, lse, masking.origin),
        (*out.stride()[:3], *sink_strides(sinks), origin_stride(masking.origin)),
        (q_length * rows_per_token, kv_length, masking.q_origin - masking.kv_origin, masking.back, masking.ahead,
         blocks, heads, adjacent, batch * heads, scale * _LOG2E),
        (tile.packed, group, width, v_width, tile.rows, tile.columns, tile.stages, tile.warps),
        tile,
    )
    # fmt: on
