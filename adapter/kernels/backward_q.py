"""Gradient of the query: one program for each block of query rows."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from .tiles import LOG2E, device_origin, interval, load_rows, load_tile, soft_capped, store_tile


@triton.jit
def _key_tiles(
    low, high, dq0, dq1, q0, q1, do0, do1, lse, delta,
    K, V, stride_k, stride_v, row_low, row_high, row_document, DOCUMENTS, PADDING, kv_length, scale, softcap,
    MASKED: tl.constexpr, CAPPED: tl.constexpr,
    WIDTH: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, V_WIDTH: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr,
    BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Add what the keys from `low` to `high` give."""
    for start in tl.range(low, high, BLOCK_N, num_stages=STAGES):
        k_base = K + tl.cast(start, tl.int64) * stride_k
        v_base = V + tl.cast(start, tl.int64) * stride_v
        inner = tl.arange(0, BLOCK_N)
        left = kv_length - start
        k0 = load_tile(k_base, inner, stride_k, left, 0, WIDTH, D0, MASKED)
        logits = tl.dot(q0, tl.trans(k0), input_precision="ieee")
        if D1 > 0:
            k1 = load_tile(k_base, inner, stride_k, left, D0, WIDTH, D1, MASKED)
            logits = tl.dot(q1, tl.trans(k1), logits, input_precision="ieee")
        v0 = load_tile(v_base, inner, stride_v, left, 0, V_WIDTH, V0, MASKED)
        slope = tl.dot(do0, tl.trans(v0), input_precision="ieee")
        if V1 > 0:
            v1 = load_tile(v_base, inner, stride_v, left, V0, V_WIDTH, V1, MASKED)
            slope = tl.dot(do1, tl.trans(v1), slope, input_precision="ieee")
        if CAPPED:
            logits = soft_capped(logits * scale, softcap)
            weights = tl.exp2(logits * LOG2E - lse[:, None])
        else:
            weights = tl.exp2(logits * scale - lse[:, None])
        slope = weights * (slope - delta[:, None])
        if CAPPED:
            slope = slope * (1.0 - (logits / softcap) * (logits / softcap))
        if MASKED:
            columns = start + inner
            seen = (columns[None, :] >= row_low[:, None]) & (columns[None, :] < row_high[:, None])
            if DOCUMENTS is not None:
                document = tl.load(DOCUMENTS + columns, mask=columns < kv_length, other=0)
                seen = seen & (row_document[:, None] == document[None, :])
            if PADDING is not None:
                seen = seen & (tl.load(PADDING + columns, mask=columns < kv_length, other=0) != 0)[None, :]
            slope = tl.where(seen, slope, 0.0)
        dq0 = tl.dot(slope.to(k0.dtype), k0, dq0, input_precision="ieee")
        if D1 > 0:
            dq1 = tl.dot(slope.to(k1.dtype), k1, dq1, input_precision="ieee")
    return dq0, dq1


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
def query_gradient(
    Q, K, V, DO, LSE, DELTA, DQ, ORIGIN, CHUNK_START, DOCUMENTS, QUERY_DOCUMENTS, PADDING, EXTENTS,
    stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_kt, stride_vb, stride_vh, stride_vt,
    stride_dob, stride_dot, stride_doh, stride_dqb, stride_dqh, stride_dqt, stride_origin,
    q_length, kv_length, q_origin, kv_origin, back, ahead, chunk, blocks, rows_of_heads, adjacent, total_heads,
    scale, factor, softcap,
    CHUNKED: tl.constexpr, CAPPED: tl.constexpr, PACKED: tl.constexpr, GROUP: tl.constexpr,
    WIDTH: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, V_WIDTH: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, PHASES: tl.constexpr,
):  # fmt: skip
    """dQ of one block of query rows; `factor` is scale * log2(e), or scale when CAPPED. LSE is in base 2, and with
    DELTA
    [batch, kv heads, tokens, group]."""
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
        kv_heads = rows_of_heads
    else:
        first_token = block * BLOCK_M
        token = rows
        member = tl.zeros_like(rows)
        kv_head = lane // GROUP
        first_head = lane
        kv_heads = rows_of_heads // GROUP
    valid = token < q_length
    step = token - first_token
    first_token = first_token.to(tl.int64)
    q_base = Q + batch * stride_qb + first_head * stride_qh + first_token * stride_qt
    q_rows = step * stride_qt + member * stride_qh
    do_base = DO + batch * stride_dob + first_head * stride_doh + first_token * stride_dot
    do_rows = step * stride_dot + member * stride_doh
    q0 = load_rows(q_base, q_rows, valid, 0, WIDTH, D0)
    q1 = q0
    if D1 > 0:
        q1 = load_rows(q_base, q_rows, valid, D0, WIDTH, D1)
    do0 = load_rows(do_base, do_rows, valid, 0, V_WIDTH, V0)
    do1 = do0
    if V1 > 0:
        do1 = load_rows(do_base, do_rows, valid, V0, V_WIDTH, V1)
    scalars = ((batch * kv_heads + kv_head) * q_length + token) * GROUP + (first_head + member) % GROUP
    lse = tl.load(LSE + scalars, mask=valid, other=0.0)
    delta = tl.load(DELTA + scalars, mask=valid, other=0.0)

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
    middle = high
    late = high
    if PHASES and full_high - full_low >= BLOCK_N:
        middle = low + tl.cdiv(tl.maximum(full_low - low, 0), BLOCK_N) * BLOCK_N
        late = middle + tl.maximum(full_high - middle, 0) // BLOCK_N * BLOCK_N

    dq0 = tl.zeros([BLOCK_M, D0], tl.float32)
    dq1 = tl.zeros([BLOCK_M, D1 if D1 > 0 else 1], tl.float32)
    K += batch * stride_kb + kv_head * stride_kh
    V += batch * stride_vb + kv_head * stride_vh
    dq0, dq1 = _key_tiles(
        low, middle, dq0, dq1, q0, q1, do0, do1, lse, delta, K, V, stride_kt, stride_vt,
        row_low, row_high, row_document, DOCUMENTS, PADDING, kv_length, factor, softcap,
        True, CAPPED, WIDTH, D0, D1, V_WIDTH, V0, V1, BLOCK_N, STAGES,
    )  # fmt: skip
    if PHASES:
        dq0, dq1 = _key_tiles(
            middle, late, dq0, dq1, q0, q1, do0, do1, lse, delta, K, V, stride_kt, stride_vt,
            row_low, row_high, row_document, DOCUMENTS, PADDING, kv_length, factor, softcap,
            False, CAPPED, WIDTH, D0, D1, V_WIDTH, V0, V1, BLOCK_N, STAGES,
        )  # fmt: skip
        dq0, dq1 = _key_tiles(
            late, high, dq0, dq1, q0, q1, do0, do1, lse, delta, K, V, stride_kt, stride_vt,
            row_low, row_high, row_document, DOCUMENTS, PADDING, kv_length, factor, softcap,
            True, CAPPED, WIDTH, D0, D1, V_WIDTH, V0, V1, BLOCK_N, STAGES,
        )  # fmt: skip
    dq_base = DQ + batch * stride_dqb + first_head * stride_dqh + first_token * stride_dqt
    dq_rows = step * stride_dqt + member * stride_dqh
    store_tile(dq_base, dq_rows, valid, dq0 * scale, 0, WIDTH, D0)
    if D1 > 0:
        store_tile(dq_base, dq_rows, valid, dq1 * scale, D0, WIDTH, D1)
