"""Attention with sinks over many queries: the forward kernel and its launcher.

The sink is the first column of the online softmax: the running maximum starts at the sink's logit and the running sum
at 1, so no
row is ever empty. Logits are kept in base 2: `scale * log2(e)` is folded into the exponent's multiply-add.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import hopper_launch
from .choice import tile_on
from .extents import query_extents
from .launching import launch
from .masking import Masking, bytes_of, origin_stride, sink_strides, strides_of
from .shapes import ceil_div, halves, on_device_of, rows_ready
from .softmax import attend_tiles
from .tiles import LOG2E, LOWEST, device_origin, interval, load_rows, sink_logits, store_tile
from .tuning import Tile

_VARYING = [
    "q_length",
    "kv_length",
    "q_origin",
    "kv_origin",
    "back",
    "ahead",
    "chunk",
    "blocks",
    "rows_of_heads",
    "adjacent",
    "total_heads",
]


@triton.jit(do_not_specialize=_VARYING)
def _forward(
    Q, K, V, SINKS, OUT, LSE,
    ORIGIN, CHUNK_START, DOCUMENTS, QUERY_DOCUMENTS, PADDING, DENSE, BIAS, EXTENTS,
    stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_kt, stride_vb, stride_vh, stride_vt,
    stride_ob, stride_ot, stride_oh, stride_sb, stride_sh, stride_st,
    stride_db, stride_dh, stride_dt, stride_dc, stride_bb, stride_bh, stride_bt, stride_bc, stride_origin,
    q_length, kv_length, q_origin, kv_origin, back, ahead, chunk, blocks, rows_of_heads, adjacent, total_heads,
    scale, softcap,
    CHUNKED: tl.constexpr, CAPPED: tl.constexpr, PACKED: tl.constexpr, GROUP: tl.constexpr, CLEAN_V: tl.constexpr,
    WIDTH: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, V_WIDTH: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, PHASES: tl.constexpr,
):  # fmt: skip
    # Longest blocks first, and `adjacent` heads side by side, so that their keys and values stay in the L2 cache.
    section = tl.program_id(0) // (blocks * adjacent)
    within = tl.program_id(0) % (blocks * adjacent)
    side = tl.minimum(adjacent, total_heads - section * adjacent)
    block = blocks - 1 - within // side
    head_row = section * adjacent + within % side
    batch = (head_row // rows_of_heads).to(tl.int64)
    lane = head_row % rows_of_heads

    rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
    if PACKED:
        first_token = block * BLOCK_M // GROUP
        token = rows // GROUP
        member = rows % GROUP
        kv_head = lane
        first_head = lane * GROUP
    else:
        first_token = block * BLOCK_M
        token = rows
        member = tl.zeros_like(rows)
        kv_head = lane // GROUP
        first_head = lane
    valid = token < q_length
    step = token - first_token
    first_token = first_token.to(tl.int64)
    q_base = Q + batch * stride_qb + first_head * stride_qh + first_token * stride_qt
    q_rows = step * stride_qt + member * stride_qh
    q0 = load_rows(q_base, q_rows, valid, 0, WIDTH, D0)
    q1 = q0
    if D1 > 0:
        q1 = load_rows(q_base, q_rows, valid, D0, WIDTH, D1)

    q_origin = device_origin(ORIGIN, q_origin, batch, stride_origin)
    row_low, row_high = interval(
        token, q_origin, kv_origin, back, ahead, kv_length, CHUNK_START, batch, chunk, CHUNKED
    )  # fmt: skip
    row_high = tl.where(valid, row_high, 0)
    low = tl.min(tl.where(row_high > row_low, row_low, kv_length), 0)
    high = tl.max(row_high, 0)
    full_low = tl.max(tl.where(valid, row_low, 0), 0)
    full_high = tl.min(tl.where(valid, row_high, kv_length), 0)
    row_document = row_low
    if DOCUMENTS is not None:
        DOCUMENTS += batch * kv_length
        row_document = tl.load(QUERY_DOCUMENTS + batch * q_length + token, mask=valid, other=0)
    if PADDING is not None:
        PADDING += batch * kv_length
    if EXTENTS is not None:
        extent = EXTENTS + (batch * blocks + block) * 4
        low = tl.maximum(low, tl.load(extent))
        high = tl.minimum(high, tl.load(extent + 1))
        full_low = tl.maximum(full_low, tl.load(extent + 2))
        full_high = tl.minimum(full_high, tl.load(extent + 3))
    dense_rows = None
    if DENSE is not None:
        dense_rows = DENSE + batch * stride_db + (first_head + member) * stride_dh + token.to(tl.int64) * stride_dt
    bias_rows = None
    if BIAS is not None:
        bias_rows = BIAS + batch * stride_bb + (first_head + member) * stride_bh + token.to(tl.int64) * stride_bt
    # [low, middle) and [late, high) are masked tile by tile, [middle, late) is visible to every row.
    middle = high
    late = high
    if PHASES and full_high - full_low >= BLOCK_N:
        middle = low + tl.cdiv(tl.maximum(full_low - low, 0), BLOCK_N) * BLOCK_N
        late = middle + tl.maximum(full_high - middle, 0) // BLOCK_N * BLOCK_N

    if SINKS is not None:
        sink = sink_logits(SINKS, batch, first_head + member, token, stride_sb, stride_sh, stride_st, valid)
        largest = tl.maximum(sink, LOWEST)
        total = tl.exp2(sink - largest)
    else:
        largest = tl.full([BLOCK_M], LOWEST, tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
    acc0 = tl.zeros([BLOCK_M, V0], tl.float32)
    acc1 = tl.zeros([BLOCK_M, V1 if V1 > 0 else 1], tl.float32)
    K += batch * stride_kb + kv_head * stride_kh
    V += batch * stride_vb + kv_head * stride_vh
    acc0, acc1, largest, total = attend_tiles(
        low, middle, acc0, acc1, largest, total, q0, q1, K, V, stride_kt, stride_vt, None, 0, 0,
        row_low, row_high, row_document, DOCUMENTS, PADDING, dense_rows, stride_dc, bias_rows, stride_bc,
        kv_length, scale, softcap, True, CLEAN_V, CAPPED, WIDTH, D0, D1, V_WIDTH, V0, V1, BLOCK_N, STAGES, 1,
    )  # fmt: skip
    if PHASES:
        acc0, acc1, largest, total = attend_tiles(
            middle, late, acc0, acc1, largest, total, q0, q1, K, V, stride_kt, stride_vt, None, 0, 0,
            row_low, row_high, row_document, DOCUMENTS, PADDING, dense_rows, stride_dc, bias_rows, stride_bc,
            kv_length, scale, softcap, False, False, CAPPED, WIDTH, D0, D1, V_WIDTH, V0, V1, BLOCK_N, STAGES, 1,
        )  # fmt: skip
        acc0, acc1, largest, total = attend_tiles(
            late, high, acc0, acc1, largest, total, q0, q1, K, V, stride_kt, stride_vt, None, 0, 0,
            row_low, row_high, row_document, DOCUMENTS, PADDING, dense_rows, stride_dc, bias_rows, stride_bc,
            kv_length, scale, softcap, True, CLEAN_V, CAPPED, WIDTH, D0, D1, V_WIDTH, V0, V1, BLOCK_N, STAGES, 1,
        )  # fmt: skip

    # Without a sink a row that sees nothing has the sum 0: its output is 0, its log-sum-exp -inf.
    inverse = tl.where(total > 0, 1.0 / total, 0.0)
    out_base = OUT + batch * stride_ob + first_head * stride_oh + first_token * stride_ot
    out_rows = step * stride_ot + member * stride_oh
    store_tile(out_base, out_rows, valid, acc0 * inverse[:, None], 0, V_WIDTH, V0)
    if V1 > 0:
        store_tile(out_base, out_rows, valid, acc1 * inverse[:, None], V0, V_WIDTH, V1)
    lse = tl.where(total > 0, (largest + tl.log2(total)) / LOG2E, float("-inf"))
    heads_per_row = rows_of_heads if not PACKED else rows_of_heads * GROUP
    tl.store(LSE + (batch * heads_per_row + first_head + member) * q_length + token, lse, mask=valid)


_LOG2E = math.log2(math.e)
_CACHED_BYTES = 24 << 20
"""Keys and values that heads running side by side may hold in the L2 cache."""


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    scale: float,
    softcap: float | None,
    masking: Masking,
    tile: Tile | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention forward.

    Args:
        query: [batch, num_heads, q_length, qk_head_dim], fp16, bf16 or fp32.
        key: [batch, num_kv_heads, kv_length, qk_head_dim], the query's dtype.
        value: [batch, num_kv_heads, kv_length, v_head_dim], the query's dtype.
        sinks: [num_heads] or [batch, num_heads, q_length, 1]; None for none.
        scale: positive factor of query @ key.
        softcap: None for none.
        masking: which keys each query sees, expanded to this call's shape.
        tile: instead of the tuned one.

    Returns:
        Output [batch, q_length, num_heads, v_head_dim] in the query's dtype, and the natural log-sum-exp of the
        logits and the
        sink, [batch, num_heads, q_length] fp32. A row that sees no key has output 0 and its sink as log-sum-exp.
    """
    batch, num_heads, q_length, width = query.shape
    kv_heads, kv_length, v_width = key.shape[1], key.shape[2], value.shape[3]
    group = num_heads // kv_heads
    query, key, value = rows_ready(query), rows_ready(key), rows_ready(value)
    out = torch.empty(batch, q_length, num_heads, v_width, dtype=query.dtype, device=query.device)
    lse = torch.empty(batch, num_heads, q_length, dtype=torch.float32, device=query.device)
    if not out.numel():
        return out, lse
    if tile is None:
        tile = tile_on("prefill", query, value, kv_heads, kv_length, masking.is_windowed)
    if hopper_launch.accepts(query, key, value, softcap, masking, tile):
        with on_device_of(query):
            hopper_launch.launch(query, key, value, sinks, out, lse, scale, masking, tile)
        return out, lse
    heads = kv_heads if tile.packed else num_heads
    rows_per_token = group if tile.packed else 1
    blocks = ceil_div(q_length * rows_per_token, tile.rows)
    extents = query_extents(masking, q_length, kv_length, tile.rows, rows_per_token)
    fitting = max(1, _CACHED_BYTES // (kv_length * (width + v_width) * query.element_size()))
    adjacent = min(batch * heads, fitting * (1 if tile.packed else group))
    with on_device_of(query):
        # fmt: off
        launch(
            _forward, (blocks * batch * heads, 1, 1),
            (query, key, value, sinks, out, lse, masking.origin, masking.chunk_start, masking.documents,
             masking.query_documents, bytes_of(masking.padding), bytes_of(masking.dense), masking.bias, extents),
            (*query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *out.stride()[:3], *sink_strides(sinks),
             *strides_of(masking.dense), *strides_of(masking.bias), origin_stride(masking.origin)),
            (q_length, kv_length, masking.q_origin, masking.kv_origin, masking.back, masking.ahead, masking.chunk,
             blocks, heads, adjacent, batch * heads, scale * _LOG2E if softcap is None else scale, softcap or 1.0),
            (masking.chunk > 0, softcap is not None, tile.packed, group, masking.may_hide_garbage(q_length, kv_length),
             width, *halves(width), v_width, *halves(v_width),
             tile.rows, tile.columns, tile.stages, tile.phases and not masking.is_dense),
            tile,
        )
        # fmt: on
    return out, lse
