"""Attention with sinks for a few queries over a long cache: keys are split over programs, and the last one to finish
a row
merges them. The partial results hold no sink; it joins exactly once, at the merge.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import functools
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import counters
from .choice import tile_on
from .launching import launch
from .masking import Masking, bytes_of, origin_stride, sink_strides, strides_of
from .shapes import ceil_div, ceil_power_of_two, halves, on_device_of, rows_ready
from .softmax import attend_tiles
from .tiles import LOG2E, LOWEST, UNLIMITED, device_origin, interval, load_rows, sink_logits, store_tile
from .tuning import Tile


@triton.jit
def _merge(
    PARTIAL, LARGEST, TOTAL, unit, sink, rows, first, valid,
    SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
    UNROLL: tl.constexpr,
):  # fmt: skip
    """Columns from `first` of the merged output of one unit's rows, and their maximum and sum in base 2; the sink
    joins here."""
    largest = tl.maximum(sink, LOWEST)
    total = tl.exp2(sink - largest)
    acc = tl.zeros([ROWS, BLOCK], tl.float32)
    columns = first + tl.arange(0, BLOCK)
    mask = valid[:, None] & (columns < WIDTH)[None, :]
    for start in tl.range(0, SPLITS, UNROLL):
        # Loads of one round depend on nothing, so that they are in flight together.
        for step in tl.static_range(UNROLL):
            row = (unit * SPLITS + start + step) * BLOCK_M + rows
            there = valid & (start + step < SPLITS)
            part = tl.load(LARGEST + row, mask=there, other=LOWEST, cache_modifier=".cg")
            part_total = tl.load(TOTAL + row, mask=there, other=0.0, cache_modifier=".cg")
            pointers = PARTIAL + row[:, None] * WIDTH + columns[None, :]
            values = tl.load(pointers, mask=mask & (start + step < SPLITS), other=0.0, cache_modifier=".cg")
            new_largest = tl.maximum(largest, part)
            shrink = tl.exp2(largest - new_largest)
            share = tl.exp2(part - new_largest)
            total = total * shrink + part_total * share
            acc = acc * shrink[:, None] + values * share[:, None]
            largest = new_largest
    return acc * tl.where(total > 0, 1.0 / total, 0.0)[:, None], largest, total


_VARYING = ["q_length", "kv_length", "q_origin", "kv_origin", "back", "ahead", "chunk"]


@triton.jit(do_not_specialize=_VARYING)
def _decode(
    Q, K, V, SINKS, OUT, LSE, PARTIAL, COUNTERS,
    ORIGIN, LENGTHS, TABLE, CHUNK_START, PADDING, DENSE, BIAS,
    stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_kt, stride_vb, stride_vh, stride_vt,
    stride_ob, stride_ot, stride_oh, stride_sb, stride_sh, stride_st,
    stride_db, stride_dh, stride_dt, stride_dc, stride_bb, stride_bh, stride_bt, stride_bc, stride_origin, stride_table,
    q_length, kv_length, q_origin, kv_origin, back, ahead, chunk, scale, softcap,
    CHUNKED: tl.constexpr, CAPPED: tl.constexpr, GROUP: tl.constexpr, CLEAN_V: tl.constexpr, PAGE: tl.constexpr,
    WIDTH: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, V_WIDTH: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, SPLITS: tl.constexpr, ROWS: tl.constexpr,
    UNROLL: tl.constexpr,
):  # fmt: skip
    split = tl.program_id(0) % SPLITS
    block = tl.program_id(0) // SPLITS
    kv_head = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    kv_heads = tl.num_programs(1)
    inner = tl.arange(0, BLOCK_M)
    rows = block * BLOCK_M + inner
    token = rows // GROUP
    member = rows % GROUP
    valid = token < q_length
    first_head = kv_head * GROUP
    q_base = Q + batch * stride_qb + first_head * stride_qh
    q_rows = token * stride_qt + member * stride_qh
    q0 = load_rows(q_base, q_rows, valid, 0, WIDTH, D0)
    q1 = q0
    if D1 > 0:
        q1 = load_rows(q_base, q_rows, valid, D0, WIDTH, D1)

    length = kv_length
    if LENGTHS is not None:
        length = tl.minimum(tl.load(LENGTHS + batch).to(tl.int32), kv_length)
    q_origin = device_origin(ORIGIN, q_origin, batch, stride_origin)
    row_low, row_high = interval(
        token, q_origin, kv_origin, back, ahead, length, CHUNK_START, batch, chunk, CHUNKED
    )  # fmt: skip
    row_high = tl.where(valid, row_high, 0)
    low = tl.min(tl.where(row_high > row_low, row_low, length), 0)
    high = tl.max(row_high, 0)
    share = tl.cdiv(tl.cdiv(tl.maximum(high - low, 0), BLOCK_N), SPLITS) * BLOCK_N
    begin = low + split * share
    end = tl.minimum(high, begin + share)
    if PADDING is not None:
        PADDING += batch * kv_length
    dense_rows = None
    if DENSE is not None:
        dense_rows = DENSE + batch * stride_db + (first_head + member) * stride_dh + token * stride_dt
    bias_rows = None
    if BIAS is not None:
        bias_rows = BIAS + batch * stride_bb + (first_head + member) * stride_bh + token * stride_bt
    if TABLE is not None:
        TABLE += batch * stride_table
        K += kv_head * stride_kh
        V += kv_head * stride_vh
    else:
        K += batch * stride_kb + kv_head * stride_kh
        V += batch * stride_vb + kv_head * stride_vh

    largest = tl.full([BLOCK_M], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if SPLITS == 1 and SINKS is not None:
        sink = sink_logits(SINKS, batch, first_head + member, token, stride_sb, stride_sh, stride_st, valid)
        largest = tl.maximum(sink, LOWEST)
        total = tl.exp2(sink - largest)
    acc0 = tl.zeros([BLOCK_M, V0], tl.float32)
    acc1 = tl.zeros([BLOCK_M, V1 if V1 > 0 else 1], tl.float32)
    acc0, acc1, largest, total = attend_tiles(
        begin, end, acc0, acc1, largest, total, q0, q1, K, V, stride_kt, stride_vt, TABLE, stride_kb, stride_vb,
        row_low, row_high, row_low, None, PADDING, dense_rows, stride_dc, bias_rows, stride_bc,
        end, scale, softcap, True, CLEAN_V, CAPPED, WIDTH, D0, D1, V_WIDTH, V0, V1, BLOCK_N, STAGES, PAGE,
    )  # fmt: skip

    out_base = OUT + batch * stride_ob + first_head * stride_oh
    out_rows = token * stride_ot + member * stride_oh
    if SPLITS == 1:
        lse_rows = LSE + (batch * kv_heads * GROUP + first_head + member) * q_length + token
        inverse = tl.where(total > 0, 1.0 / total, 0.0)
        store_tile(out_base, out_rows, valid, acc0 * inverse[:, None], 0, V_WIDTH, V0)
        if V1 > 0:
            store_tile(out_base, out_rows, valid, acc1 * inverse[:, None], V0, V_WIDTH, V1)
        tl.store(lse_rows, tl.where(total > 0, (largest + tl.log2(total)) / LOG2E, float("-inf")), mask=valid)
    else:
        blocks = tl.num_programs(0) // SPLITS
        unit = (batch * kv_heads + kv_head) * blocks + block
        part = (unit * SPLITS + split) * BLOCK_M + inner
        # One buffer: all outputs, then all maxima, then all sums.
        all_rows = tl.num_programs(2).to(tl.int64) * kv_heads * blocks * (SPLITS * BLOCK_M)
        LARGEST = PARTIAL + all_rows * V_WIDTH
        TOTAL = LARGEST + all_rows
        store_tile(PARTIAL, part * V_WIDTH, valid, acc0, 0, V_WIDTH, V0)
        if V1 > 0:
            store_tile(PARTIAL, part * V_WIDTH, valid, acc1, V0, V_WIDTH, V1)
        tl.store(LARGEST + part, largest, mask=valid)
        tl.store(TOTAL + part, total, mask=valid)
        # Every thread's stores come before the one thread's arrival, which releases them to the last program.
        tl.debug_barrier()
        arrived = tl.atomic_add(COUNTERS + unit, 1, sem="acq_rel")
        if arrived == SPLITS - 1:
            merged_rows = tl.arange(0, ROWS)
            its_token = (block * BLOCK_M + merged_rows) // GROUP
            its_head = first_head + (block * BLOCK_M + merged_rows) % GROUP
            real = its_token < q_length
            sink = tl.full([ROWS], float("-inf"), tl.float32)
            if SINKS is not None:
                sink = sink_logits(SINKS, batch, its_head, its_token, stride_sb, stride_sh, stride_st, real)
            places = its_token * stride_ot + its_head * stride_oh
            merged, its_largest, its_total = _merge(
                PARTIAL, LARGEST, TOTAL, unit, sink, merged_rows, 0, real, SPLITS, BLOCK_M, ROWS, V0, V_WIDTH, UNROLL
            )  # fmt: skip
            store_tile(OUT + batch * stride_ob, places, real, merged, 0, V_WIDTH, V0)
            lse = tl.where(its_total > 0, (its_largest + tl.log2(its_total)) / LOG2E, float("-inf"))
            tl.store(LSE + (batch * kv_heads * GROUP + its_head) * q_length + its_token, lse, mask=real)
            if V1 > 0:
                merged, its_largest, its_total = _merge(
                    PARTIAL, LARGEST, TOTAL, unit, sink, merged_rows, V0, real, SPLITS, BLOCK_M, ROWS, V1, V_WIDTH,
                        UNROLL
                )  # fmt: skip
                store_tile(OUT + batch * stride_ob, places, real, merged, V0, V_WIDTH, V1)
            tl.store(COUNTERS + unit, 0)


_LOG2E = math.log2(math.e)
_MOST_SPLITS = 64
_INTERPRETED_SPLITS = 3


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def splits_for(units: int, span: int, tile: Tile, device: torch.device) -> int:
    """How many programs share the keys of one unit, from numbers that the host knows without asking the device.

    Args:
        units: batch * kv heads * blocks of rows.
        span: the most keys that a row can see.
        tile: `splits` programs a multiprocessor are aimed at; 0 never splits.
    """
    most = min(_MOST_SPLITS, ceil_div(span, tile.columns))
    if device.type == "cpu":
        return max(1, min(most, _INTERPRETED_SPLITS))
    processors = _multiprocessors(device)
    wanted = processors * tile.splits // units
    if wanted == 1 and units < processors:
        wanted = 2
    return max(1, min(most, wanted))


def _block_rows(rows: int, width: int, least: int) -> int:
    most = 64 if width <= 128 else 32 if width <= 256 else 16
    return max(least, min(most, ceil_power_of_two(rows)))


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    scale: float,
    softcap: float | None,
    masking: Masking,
    lengths: Tensor | None = None,
    block_table: Tensor | None = None,
    tile: Tile | None = None,
    splits: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of a few queries over a cache; nothing is read back from the device, so a graph can hold it.

    Args:
        query: [batch, num_heads, q_length, qk_head_dim], fp16, bf16 or fp32.
        key: [batch, num_kv_heads, capacity, qk_head_dim]; with a block table [pages, num_kv_heads, page_size,
        qk_head_dim].
        value: the same with v_head_dim.
        sinks: [num_heads] or [batch, num_heads, q_length, 1]; None for none.
        scale: positive factor of query @ key.
        softcap: None for none.
        masking: which slots each query sees; no documents.
        lengths: [batch] integers on the device, slots written; None for all.
        block_table: [batch, pages of a row] int32; None for a contiguous cache.
        tile: instead of the tuned one.
        splits: instead of the tuned number.

    Returns:
        As `prefill.attend`.
    """
    batch, num_heads, q_length, width = query.shape
    kv_heads, v_width = key.shape[1], value.shape[3]
    page = key.shape[2] if block_table is not None else 1
    kv_length = key.shape[2] if block_table is None else block_table.shape[1] * page
    group = num_heads // kv_heads
    query, key, value = rows_ready(query), rows_ready(key), rows_ready(value)
    device = query.device
    out = torch.empty(batch, q_length, num_heads, v_width, dtype=query.dtype, device=device)
    lse = torch.empty(batch, num_heads, q_length, dtype=torch.float32, device=device)
    if not out.numel():
        return out, lse
    widest = max(width, v_width)
    tile = tile or tile_on("decode", query, value, kv_heads, kv_length, masking.is_windowed)
    block_m = _block_rows(q_length * group, widest, tile.rows)
    blocks = ceil_div(q_length * group, block_m)
    units = batch * kv_heads * blocks
    if splits is None:
        splits = splits_for(units, min(kv_length, masking.back + masking.ahead + q_length), tile, device)
    partial = arrivals = None
    if splits > 1:
        partial = torch.empty(units * splits * block_m * (v_width + 2), dtype=torch.float32, device=device)
        arrivals = counters.take(units, device)
    with on_device_of(query):
        # fmt: off
        launch(
            _decode, (splits * blocks, kv_heads, batch),
            (query, key, value, sinks, out, lse, partial, arrivals, masking.origin, lengths, block_table,
             masking.chunk_start, bytes_of(masking.padding), bytes_of(masking.dense), masking.bias),
            (*query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *out.stride()[:3], *sink_strides(sinks),
             *strides_of(masking.dense), *strides_of(masking.bias), origin_stride(masking.origin),
             0 if block_table is None else block_table.stride(0)),
            (q_length, kv_length, masking.q_origin, masking.kv_origin, masking.back, masking.ahead, masking.chunk,
             scale * _LOG2E if softcap is None else scale, softcap or 1.0),
            (masking.chunk > 0, softcap is not None, group, masking.padding is not None or masking.dense is not None,
                page,
             width, *halves(width), v_width, *halves(v_width), block_m, tile.columns, tile.stages, splits,
             min(block_m, ceil_power_of_two(q_length * group)), min(16, splits)),
            tile,
        )
        # fmt: on
    return out, lse


def over_cache(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Tensor,
    sinks: Tensor | None,
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    block_table: Tensor | None = None,
    ring: bool = False,
) -> tuple[Tensor, Tensor]:
    """Decode over a cache whose rows have lengths of their own.

    Args:
        lengths: [batch] integers on the device: slots written, this call's queries included.
        window: the last `window` tokens are visible, the query's own included; None for all.
        block_table: as in `attend`.
        ring: slots are in no order and every written one is visible (a sliding layer's ring buffer, one query).

    Returns:
        As `attend`.
    """
    if ring:
        masking = Masking()
    else:
        back = UNLIMITED if window is None else window - 1
        masking = Masking(q_origin=-query.shape[2], origin=lengths, back=back, ahead=0)
    return attend(query, key, value, sinks, scale, softcap, masking, lengths, block_table)
