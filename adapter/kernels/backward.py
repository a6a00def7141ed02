"""Attention with sinks backward: gradients of query, key, value and sinks, the same bits every time.

With delta = rowsum(dO * O) - dlse, where O is normalised by a sum that holds the sink, the usual formulas hold
unchanged and
dsink = -sum(exp(sink - lse) * delta).
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from .backward_kv import key_value_gradients
from .backward_q import query_gradient
from .choice import tile_on
from .extents import key_extents, query_extents
from .launching import launch
from .masking import Masking, bytes_of, origin_stride, sink_strides
from .shapes import ceil_div, halves, on_device_of, rows_ready
from .tiles import LOG2E, LOWEST, load_rows, sink_logits
from .tuning import Tile

_LOG2E = math.log2(math.e)
_CACHED_KEYS = 24 << 20
_CACHED_QUERIES = 40 << 20
"""Bytes that heads running side by side may hold in the L2 cache."""
_ROWS = 128
_PLAIN = Tile(_ROWS, 0, warps=4, stages=1)


@triton.jit(do_not_specialize=["q_length", "num_heads", "blocks"])
def _deltas(
    OUT, DO, LSE, DLSE, SINKS, LSE2, DELTA, DSINK,
    stride_ob, stride_ot, stride_oh, stride_dob, stride_dot, stride_doh, stride_sb, stride_sh, stride_st,
    q_length, num_heads, blocks,
    PER_TOKEN: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr,
    BLOCK_M: tl.constexpr,
):  # fmt: skip
    """delta and the log-sum-exp in base 2 of one block of tokens of one head, a group's heads side by side, and what
    they
    give to the sink's gradient."""
    block = tl.program_id(0) % blocks
    head_row = tl.program_id(0) // blocks
    batch = (head_row // num_heads).to(tl.int64)
    head = head_row % num_heads
    inner = tl.arange(0, BLOCK_M)
    first = tl.cast(block * BLOCK_M, tl.int64)
    token = block * BLOCK_M + inner
    valid = token < q_length
    o_base = OUT + batch * stride_ob + head * stride_oh + first * stride_ot
    do_base = DO + batch * stride_dob + head * stride_doh + first * stride_dot
    o0 = load_rows(o_base, inner * stride_ot, valid, 0, WIDTH, V0).to(tl.float32)
    do0 = load_rows(do_base, inner * stride_dot, valid, 0, WIDTH, V0).to(tl.float32)
    delta = tl.sum(o0 * do0, 1)
    if V1 > 0:
        o1 = load_rows(o_base, inner * stride_ot, valid, V0, WIDTH, V1).to(tl.float32)
        do1 = load_rows(do_base, inner * stride_dot, valid, V0, WIDTH, V1).to(tl.float32)
        delta += tl.sum(o1 * do1, 1)
    row = tl.cast(head_row, tl.int64) * q_length + token
    if DLSE is not None:
        delta -= tl.load(DLSE + row, mask=valid, other=0.0)
    packed = (tl.cast(head_row // GROUP, tl.int64) * q_length + token) * GROUP + head_row % GROUP
    lse = tl.maximum(tl.load(LSE + row, mask=valid, other=0.0) * LOG2E, LOWEST)
    tl.store(LSE2 + packed, lse, mask=valid)
    tl.store(DELTA + packed, delta, mask=valid)
    if SINKS is not None:
        sink = sink_logits(SINKS, batch, head, token, stride_sb, stride_sh, stride_st, valid)
        gradient = tl.where(valid, -tl.exp2(sink - lse) * delta, 0.0)
        if PER_TOKEN:
            tl.store(DSINK + row, gradient, mask=valid)
        else:
            tl.store(DSINK + tl.program_id(0), tl.sum(gradient, 0))


def _deltas_of(
    out: Tensor, d_out: Tensor, lse: Tensor, d_lse: Tensor | None, sinks: Tensor | None, group: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    batch, q_length, num_heads, width = out.shape
    blocks = ceil_div(q_length, _ROWS)
    lse2, delta = torch.empty_like(lse), torch.empty_like(lse)
    per_token = sinks is not None and sinks.dim() > 1
    d_sink = None
    if sinks is not None:
        shape = (batch, num_heads, q_length) if per_token else (batch, num_heads, blocks)
        d_sink = torch.empty(shape, dtype=torch.float32, device=out.device)
    # fmt: off
    launch(
        _deltas, (blocks * batch * num_heads, 1, 1),
        (out, d_out, lse, None if d_lse is None else d_lse.contiguous(), sinks, lse2, delta, d_sink),
        (*out.stride()[:3], *d_out.stride()[:3], *sink_strides(sinks)), (q_length, num_heads, blocks),
        (per_token, group, width, *halves(width), _ROWS), _PLAIN,
    )
    # fmt: on
    if sinks is None or d_sink is None:
        return lse2, delta, None
    if per_token:
        return lse2, delta, d_sink[..., None].to(sinks.dtype)
    return lse2, delta, d_sink.sum((0, 2)).to(sinks.dtype)


def gradient_like(tensor: Tensor) -> Tensor:
    """Room for a gradient, tokens outside heads: what projections read without a copy."""
    batch, heads, length, width = tensor.shape
    return tensor.new_empty(batch, length, heads, width).transpose(1, 2)


def gradients(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor,
    d_out: Tensor,
    d_lse: Tensor | None,
    scale: float,
    softcap: float | None,
    masking: Masking,
    kv_tile: Tile | None = None,
    q_tile: Tile | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Attention backward; shapes and dtypes as in `prefill.attend`, dense masks and biases left out.

    Args:
        out, lse: what the forward returned.
        d_out: [batch, q_length, num_heads, v_head_dim].
        d_lse: [batch, num_heads, q_length] fp32, or None.
        kv_tile, q_tile: instead of the tuned ones.

    Returns:
        Gradients of query, key, value and sinks, each like its tensor.
    """
    query, key, value, d_out = rows_ready(query), rows_ready(key), rows_ready(value), rows_ready(d_out)
    dq, dk, dv = gradient_like(query), gradient_like(key), gradient_like(value)
    with on_device_of(query):
        group = query.shape[1] // key.shape[1]
        lse2, delta, d_sinks = _deltas_of(out, d_out, lse, d_lse, sinks, group)
        _run_keys(query, key, value, d_out, lse2, delta, dk, dv, scale, softcap, masking, kv_tile)
        _run_queries(query, key, value, d_out, lse2, delta, dq, scale, softcap, masking, q_tile)
    return dq, dk, dv, d_sinks


def _run_keys(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    d_out: Tensor,
    lse: Tensor,
    delta: Tensor,
    dk: Tensor,
    dv: Tensor,
    scale: float,
    softcap: float | None,
    masking: Masking,
    tile: Tile | None,
) -> None:
    batch, num_heads, q_length, width = query.shape
    kv_heads, kv_length, v_width = key.shape[1], key.shape[2], value.shape[3]
    tile = tile or tile_on("backward_kv", query, value, kv_heads, kv_length, masking.is_windowed)
    blocks = ceil_div(kv_length, tile.columns)
    extents = key_extents(masking, q_length, kv_length, tile.columns)
    group = num_heads // kv_heads
    row_bytes = (width + v_width) * query.element_size() * group
    adjacent = min(batch * kv_heads, max(1, _CACHED_QUERIES // max(1, q_length * row_bytes)))
    # fmt: off
    launch(
        key_value_gradients, (blocks * batch * kv_heads, 1, 1),
        (query, key, value, d_out, lse, delta, dk, dv, masking.origin, masking.chunk_start, masking.documents,
         masking.query_documents, bytes_of(masking.padding), extents),
        (*query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *d_out.stride()[:3], *dk.stride()[:3],
         *dv.stride()[:3], origin_stride(masking.origin)),
        (q_length, kv_length, masking.q_origin, masking.kv_origin, masking.back, masking.ahead, masking.chunk,
         blocks, kv_heads, adjacent, batch * kv_heads, scale, scale * _LOG2E if softcap is None else scale,
         softcap or 1.0),
        (masking.chunk > 0, softcap is not None, group, width, *halves(width), v_width, *halves(v_width),
         tile.rows, tile.columns, tile.stages, tile.phases),
        tile,
    )
    # fmt: on


def _run_queries(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    d_out: Tensor,
    lse: Tensor,
    delta: Tensor,
    dq: Tensor,
    scale: float,
    softcap: float | None,
    masking: Masking,
    tile: Tile | None,
) -> None:
    batch, num_heads, q_length, width = query.shape
    kv_heads, kv_length, v_width = key.shape[1], key.shape[2], value.shape[3]
    group = num_heads // kv_heads
    tile = tile or tile_on("backward_q", query, value, kv_heads, kv_length, masking.is_windowed)
    heads, rows_per_token = (kv_heads, group) if tile.packed else (num_heads, 1)
    blocks = ceil_div(q_length * rows_per_token, tile.rows)
    extents = query_extents(masking, q_length, kv_length, tile.rows, rows_per_token)
    fitting = max(1, _CACHED_KEYS // max(1, kv_length * (width + v_width) * query.element_size()))
    adjacent = min(batch * heads, fitting * (group // rows_per_token))
    # fmt: off
    launch(
        query_gradient, (blocks * batch * heads, 1, 1),
        (query, key, value, d_out, lse, delta, dq, masking.origin, masking.chunk_start, masking.documents,
         masking.query_documents, bytes_of(masking.padding), extents),
        (*query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *d_out.stride()[:3], *dq.stride()[:3],
         origin_stride(masking.origin)),
        (q_length, kv_length, masking.q_origin, masking.kv_origin, masking.back, masking.ahead, masking.chunk,
         blocks, heads, adjacent, batch * heads, scale, scale * _LOG2E if softcap is None else scale, softcap or 1.0),
        (masking.chunk > 0, softcap is not None, tile.packed, group, width, *halves(width), v_width, *halves(v_width),
         tile.rows, tile.columns, tile.stages, tile.phases),
        tile,
    )
    # fmt: on
