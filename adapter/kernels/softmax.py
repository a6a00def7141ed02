"""The online softmax over tiles of keys, shared by prefill and decode."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from .tiles import LOG2E, load_tile, soft_capped


@triton.jit
def _gathered(
    base,
    TABLE,
    start,
    rows,
    stride_page,
    stride,
    rows_end,
    first,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
):
    """A tile of a paged cache: row `start + rows` lies in page TABLE[row // PAGE]."""
    row = start + rows
    real = rows < rows_end
    page = tl.load(TABLE + row // PAGE, mask=real, other=0).to(tl.int64)
    columns = first + tl.arange(0, BLOCK)
    pointers = base + (page * stride_page + (row % PAGE) * stride)[:, None] + columns[None, :]
    return tl.load(pointers, mask=real[:, None] & (columns[None, :] < WIDTH), other=0.0)


@triton.jit
def _keys(
    base,
    TABLE,
    start,
    rows,
    stride_page,
    stride,
    rows_end,
    first,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    MASKED: tl.constexpr,
    PAGE: tl.constexpr,
):
    """A tile of rows from `start`, of a contiguous cache or of a paged one."""
    if TABLE is not None:
        return _gathered(base, TABLE, start, rows, stride_page, stride, rows_end, first, WIDTH, BLOCK, PAGE)
    return load_tile(base + tl.cast(start, tl.int64) * stride, rows, stride, rows_end, first, WIDTH, BLOCK, MASKED)


@triton.jit
def attend_tiles(
    low, high,
    acc0, acc1, largest, total, q0, q1,
    K, V, stride_k, stride_v, TABLE, stride_kp, stride_vp,
    row_low, row_high, row_document, DOCUMENTS, PADDING, dense_rows, stride_dense_c, bias_rows, stride_bias_c,
    kv_length, scale, softcap,
    MASKED: tl.constexpr, CLEAN_V: tl.constexpr, CAPPED: tl.constexpr,
    WIDTH: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, V_WIDTH: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr,
    BLOCK_N: tl.constexpr, STAGES: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Take the keys from `low` to `high` into the running output, maximum and sum of every row."""
    for start in tl.range(low, high, BLOCK_N, num_stages=STAGES):
        inner = tl.arange(0, BLOCK_N)
        left = kv_length - start
        k0 = _keys(K, TABLE, start, inner, stride_kp, stride_k, left, 0, WIDTH, D0, MASKED, PAGE)
        logits = tl.dot(q0, tl.trans(k0), input_precision="ieee")
        if D1 > 0:
            k1 = _keys(K, TABLE, start, inner, stride_kp, stride_k, left, D0, WIDTH, D1, MASKED, PAGE)
            logits = tl.dot(q1, tl.trans(k1), logits, input_precision="ieee")
        factor = scale
        if CAPPED:
            logits = soft_capped(logits * scale, softcap) * LOG2E
            factor = 1.0
        columns = start + inner
        if MASKED:
            if bias_rows is not None:
                real = (columns < kv_length)[None, :] & (row_high > row_low)[:, None]
                bias = tl.load(bias_rows[:, None] + (columns * stride_bias_c)[None, :], mask=real, other=0.0)
                logits = logits * factor + bias.to(tl.float32) * LOG2E
                factor = 1.0
            seen = (columns[None, :] >= row_low[:, None]) & (columns[None, :] < row_high[:, None])
            if DOCUMENTS is not None:
                document = tl.load(DOCUMENTS + columns, mask=columns < kv_length, other=0)
                seen = seen & (row_document[:, None] == document[None, :])
            if PADDING is not None:
                seen = seen & (tl.load(PADDING + columns, mask=columns < kv_length, other=0) != 0)[None, :]
            if dense_rows is not None:
                seen = seen & (
                    tl.load(dense_rows[:, None] + (columns * stride_dense_c)[None, :], mask=seen, other=0) != 0
                )
            logits = tl.where(seen, logits, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(logits, 1) * factor)
        weights = tl.exp2(logits * factor - new_largest[:, None])
        shrink = tl.exp2(largest - new_largest)
        total = total * shrink + tl.sum(weights, 1)
        largest = new_largest
        acc0 = acc0 * shrink[:, None]
        v0 = _keys(V, TABLE, start, inner, stride_vp, stride_v, left, 0, V_WIDTH, V0, MASKED, PAGE)
        if CLEAN_V:
            # A weight of 0 times the NaN of an unused cache slot is NaN.
            used = tl.sum(tl.where(seen, 1, 0), 0) > 0
            v0 = tl.where(used[:, None], v0, 0.0)
        acc0 = tl.dot(weights.to(v0.dtype), v0, acc0, input_precision="ieee")
        if V1 > 0:
            acc1 = acc1 * shrink[:, None]
            v1 = _keys(V, TABLE, start, inner, stride_vp, stride_v, left, V0, V_WIDTH, V1, MASKED, PAGE)
            if CLEAN_V:
                v1 = tl.where(used[:, None], v1, 0.0)
            acc1 = tl.dot(weights.to(v1.dtype), v1, acc1, input_precision="ieee")
    return acc0, acc1, largest, total
