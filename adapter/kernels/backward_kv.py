"""Gradients of key and value: one program for each block of keys and kv head, so that nothing is added atomically."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from .tiles import LOG2E, device_origin, interval, load_rows, load_tile, soft_capped, store_tile


@triton.jit
def _query_tiles(
    low, high, dk0, dk1, dv0, dv1, k0, k1, v0, v1,
    Q, DO, LSE, DELTA, stride_qh, stride_qt, stride_doh, stride_dot,
    col_low, col_high, key_document, QUERY_DOCUMENTS, key_real, rows_end, scale, softcap,
    MASKED: tl.constexpr, CAPPED: tl.constexpr, GROUP: tl.constexpr,
    WIDTH: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, V_WIDTH: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr,
    BLOCK_M: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Add what the query rows from `low` to `high` give; a row is a token and a head of the group."""
    for start in tl.range(low, high, BLOCK_M, num_stages=STAGES):
        inner = tl.arange(0, BLOCK_M)
        rows = start + inner
        valid = rows < rows_end
        first = start // GROUP
        token = rows // GROUP
        q_base = Q + tl.cast(first, tl.int64) * stride_qt
        do_base = DO + tl.cast(first, tl.int64) * stride_dot
        if BLOCK_M % GROUP == 0:
            # A tile begins with a token's first head, so that these are the same for every tile.
            step = inner // GROUP
            head = inner % GROUP
        else:
            step = token - first
            head = rows % GROUP
        q_rows = step * stride_qt + head * stride_qh
        do_rows = step * stride_dot + head * stride_doh
        q0 = load_rows(q_base, q_rows, valid, 0, WIDTH, D0, MASKED)
        logits = tl.dot(k0, tl.trans(q0), input_precision="ieee")
        if D1 > 0:
            q1 = load_rows(q_base, q_rows, valid, D0, WIDTH, D1, MASKED)
            logits = tl.dot(k1, tl.trans(q1), logits, input_precision="ieee")
        if MASKED:
            lse = tl.load(LSE + rows, mask=valid, other=0.0)
            delta = tl.load(DELTA + rows, mask=valid, other=0.0)
        else:
            lse = tl.load(LSE + rows)
            delta = tl.load(DELTA + rows)
        if CAPPED:
            logits = soft_capped(logits * scale, softcap)
            weights = tl.exp2(logits * LOG2E - lse[None, :])
        else:
            weights = tl.exp2(logits * scale - lse[None, :])
        if MASKED:
            seen = (token[None, :] >= col_low[:, None]) & (token[None, :] < col_high[:, None])
            if QUERY_DOCUMENTS is not None:
                document = tl.load(QUERY_DOCUMENTS + token, mask=valid, other=0)
                seen = seen & (key_document[:, None] == document[None, :])
            if key_real is not None:
                seen = seen & (key_real != 0)[:, None]
            weights = tl.where(seen, weights, 0.0)
        do0 = load_rows(do_base, do_rows, valid, 0, V_WIDTH, V0, MASKED)
        dv0 = tl.dot(weights.to(do0.dtype), do0, dv0, input_precision="ieee")
        slope = tl.dot(v0, tl.trans(do0), input_precision="ieee")
        if V1 > 0:
            do1 = load_rows(do_base, do_rows, valid, V0, V_WIDTH, V1, MASKED)
            dv1 = tl.dot(weights.to(do1.dtype), do1, dv1, input_precision="ieee")
            slope = tl.dot(v1, tl.trans(do1), slope, input_precision="ieee")
        slope = weights * (slope - delta[None, :])
        if CAPPED:
            slope = slope * (1.0 - (logits / softcap) * (logits / softcap))
        if MASKED:
            slope = tl.where(seen, slope, 0.0)
        dk0 = tl.dot(slope.to(q0.dtype), q0, dk0, input_precision="ieee")
        if D1 > 0:
            dk1 = tl.dot(slope.to(q1.dtype), q1, dk1, input_precision="ieee")
    return dk0, dk1, dv0, dv1


_VARYING = [
    "q_length",
    "kv_length",
    "q_origin",
    "kv_origin",
    "back",
    "ahead",
    "chunk",
    "blocks",
    "kv_heads",
    "adjacent",
    "total_heads",
]


@triton.jit(do_not_specialize=_VARYING)
def key_value_gradients(
    Q, K, V, DO, LSE, DELTA, DK, DV, ORIGIN, CHUNK_START, DOCUMENTS, QUERY_DOCUMENTS, PADDING, EXTENTS,
    stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_kt, stride_vb, stride_vh, stride_vt,
    stride_dob, stride_dot, stride_doh, stride_dkb, stride_dkh, stride_dkt, stride_dvb, stride_dvh, stride_dvt,
    stride_origin,
    q_length, kv_length, q_origin, kv_origin, back, ahead, chunk, blocks, kv_heads, adjacent, total_heads,
    scale, factor, softcap,
    CHUNKED: tl.constexpr, CAPPED: tl.constexpr, GROUP: tl.constexpr,
    WIDTH: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, V_WIDTH: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, PHASES: tl.constexpr,
):  # fmt: skip
    """dK and dV of one block of keys of one kv head; `factor` is scale * log2(e), or scale when CAPPED. LSE is in
    base 2,
    and with DELTA [batch, kv heads, tokens, group]."""
    section = tl.program_id(0) // (blocks * adjacent)
    within = tl.program_id(0) % (blocks * adjacent)
    side = tl.minimum(adjacent, total_heads - section * adjacent)
    block = within // side
    head_row = section * adjacent + within % side
    batch = (head_row // kv_heads).to(tl.int64)
    kv_head = head_row % kv_heads

    inner = tl.arange(0, BLOCK_N)
    columns = block * BLOCK_N + inner
    real = columns < kv_length
    q_origin = device_origin(ORIGIN, q_origin, batch, stride_origin)
    col_low, col_high = interval(
        columns, kv_origin, q_origin, ahead, back, q_length, CHUNK_START, batch, chunk, CHUNKED
    )  # fmt: skip
    col_high = tl.where(real, col_high, 0)
    low = tl.min(tl.where(col_high > col_low, col_low, q_length), 0)
    high = tl.max(col_high, 0)
    full_low = tl.max(tl.where(real, col_low, 0), 0)
    full_high = tl.min(col_high, 0)
    key_document = columns
    if DOCUMENTS is not None:
        QUERY_DOCUMENTS += batch * q_length
        key_document = tl.load(DOCUMENTS + batch * kv_length + columns, mask=real, other=0)
    key_real = None
    if PADDING is not None:
        key_real = tl.load(PADDING + batch * kv_length + columns, mask=real, other=0)
    if EXTENTS is not None:
        extent = EXTENTS + (batch * blocks + block) * 4
        low = tl.maximum(low, tl.load(extent))
        high = tl.minimum(high, tl.load(extent + 1))
        full_low = tl.maximum(full_low, tl.load(extent + 2))
        full_high = tl.minimum(full_high, tl.load(extent + 3))
    low = low * GROUP
    high = high * GROUP
    full_low = full_low * GROUP
    full_high = full_high * GROUP
    middle = high
    late = high
    if PHASES and full_high - full_low >= BLOCK_M:
        middle = low + tl.cdiv(tl.maximum(full_low - low, 0), BLOCK_M) * BLOCK_M
        late = middle + tl.maximum(full_high - middle, 0) // BLOCK_M * BLOCK_M

    start = tl.cast(block * BLOCK_N, tl.int64)
    k_base = K + batch * stride_kb + kv_head * stride_kh + start * stride_kt
    v_base = V + batch * stride_vb + kv_head * stride_vh + start * stride_vt
    left = kv_length - block * BLOCK_N
    k0 = load_tile(k_base, inner, stride_kt, left, 0, WIDTH, D0, True)
    k1 = k0
    if D1 > 0:
        k1 = load_tile(k_base, inner, stride_kt, left, D0, WIDTH, D1, True)
    v0 = load_tile(v_base, inner, stride_vt, left, 0, V_WIDTH, V0, True)
    v1 = v0
    if V1 > 0:
        v1 = load_tile(v_base, inner, stride_vt, left, V0, V_WIDTH, V1, True)
    dk0 = tl.zeros([BLOCK_N, D0], tl.float32)
    dk1 = tl.zeros([BLOCK_N, D1 if D1 > 0 else 1], tl.float32)
    dv0 = tl.zeros([BLOCK_N, V0], tl.float32)
    dv1 = tl.zeros([BLOCK_N, V1 if V1 > 0 else 1], tl.float32)
    first_head = kv_head * GROUP
    Q += batch * stride_qb + first_head * stride_qh
    DO += batch * stride_dob + first_head * stride_doh
    LSE += (batch * kv_heads + kv_head) * q_length * GROUP
    DELTA += (batch * kv_heads + kv_head) * q_length * GROUP
    dk0, dk1, dv0, dv1 = _query_tiles(
        low, middle, dk0, dk1, dv0, dv1, k0, k1, v0, v1,
        Q, DO, LSE, DELTA, stride_qh, stride_qt, stride_doh, stride_dot,
        col_low, col_high, key_document, QUERY_DOCUMENTS, key_real, q_length * GROUP, factor, softcap,
        True, CAPPED, GROUP, WIDTH, D0, D1, V_WIDTH, V0, V1, BLOCK_M, STAGES,
    )  # fmt: skip
    if PHASES:
        dk0, dk1, dv0, dv1 = _query_tiles(
            middle, late, dk0, dk1, dv0, dv1, k0, k1, v0, v1,
            Q, DO, LSE, DELTA, stride_qh, stride_qt, stride_doh, stride_dot,
            col_low, col_high, key_document, QUERY_DOCUMENTS, key_real, q_length * GROUP, factor, softcap,
            False, CAPPED, GROUP, WIDTH, D0, D1, V_WIDTH, V0, V1, BLOCK_M, STAGES,
        )  # fmt: skip
        dk0, dk1, dv0, dv1 = _query_tiles(
            late, high, dk0, dk1, dv0, dv1, k0, k1, v0, v1,
            Q, DO, LSE, DELTA, stride_qh, stride_qt, stride_doh, stride_dot,
            col_low, col_high, key_document, QUERY_DOCUMENTS, key_real, q_length * GROUP, factor, softcap,
            True, CAPPED, GROUP, WIDTH, D0, D1, V_WIDTH, V0, V1, BLOCK_M, STAGES,
        )  # fmt: skip
    dk_base = DK + batch * stride_dkb + kv_head * stride_dkh + start * stride_dkt
    dv_base = DV + batch * stride_dvb + kv_head * stride_dvh + start * stride_dvt
    store_tile(dk_base, inner * stride_dkt, real, dk0 * scale, 0, WIDTH, D0)
    if D1 > 0:
        store_tile(dk_base, inner * stride_dkt, real, dk1 * scale, D0, WIDTH, D1)
    store_tile(dv_base, inner * stride_dvt, real, dv0, 0, V_WIDTH, V0)
    if V1 > 0:
        store_tile(dv_base, inner * stride_dvt, real, dv1, V0, V_WIDTH, V1)
