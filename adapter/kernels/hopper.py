"""The forward for compute capability 9.0: tiles come by the tensor memory accelerator, and the products of one tile
run under
the exponentials of another. The same mathematics as `prefill`, for calls that need no mask tensor.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper as sm90
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

_LOG2E = gl.constexpr(1.4426950408889634)
_LOWEST = gl.constexpr(-1.0e30)
# The same functions have other names from one Triton to the next.
_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier
_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
_REINTERPRETS = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))


@gluon.jit
def _fetch_pair(
    k_descriptor, v_descriptor, batch, head, low, pair, tiles, ready, k_buffer, v_buffer, BLOCK_N: gl.constexpr
):  # fmt: skip
    """Ask for the values of tile `pair` and the keys of the next one: what one step of the loop consumes."""
    wanted = pair < tiles
    mbarrier.expect(ready, k_descriptor.block_type.nbytes + v_descriptor.block_type.nbytes, pred=wanted)
    # Beyond the last tile the keys are asked for outside the tensor, which is zeros and no traffic.
    start = low + pair * BLOCK_N
    following = gl.where(pair + 1 < tiles, start + BLOCK_N, 1 << 30)
    _load(v_descriptor, [batch, head, start, 0], ready, v_buffer, pred=wanted)
    _load(k_descriptor, [batch, head, following, 0], ready, k_buffer, pred=wanted)


@gluon.jit
def _flat(buffer, ROWS: gl.constexpr, WIDTH: gl.constexpr, DTYPE: gl.constexpr):
    layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    if _REINTERPRETS:
        flat = buffer.reinterpret(DTYPE, [ROWS, WIDTH], layout)
    else:
        flat = buffer._reinterpret(DTYPE, [ROWS, WIDTH], layout)
    return flat


@gluon.jit
def _softmax(
    logits,
    largest,
    total,
    start,
    row_low,
    row_high,
    full_low,
    full_high,
    scale,
    BLOCK_N: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """One step of the online softmax; returns weights, the factor for what was summed before, maximum and sum."""
    if (start < full_low) | (start + BLOCK_N > full_high):
        columns = start + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, LAYOUT))
        low = gl.expand_dims(row_low, 1)
        high = gl.expand_dims(row_high, 1)
        columns = gl.expand_dims(columns, 0)
        logits = gl.where((columns >= low) & (columns < high), logits, float("-inf"))
    new_largest = gl.maximum(largest, gl.max(logits, 1) * scale)
    weights = gl.exp2(logits * scale - gl.expand_dims(new_largest, 1))
    shrink = gl.exp2(largest - new_largest)
    return weights, shrink, new_largest, total * shrink + gl.sum(weights, 1)


_VARYING = ["q_rows", "kv_length", "q_origin", "back", "ahead", "blocks", "rows_of_heads", "adjacent", "total_heads"]


@gluon.jit(do_not_specialize=_VARYING)
def forward(
    q_descriptor, k_descriptor, v_descriptor, SINKS, OUT, LSE, ORIGIN,
    stride_ob, stride_ot, stride_oh, stride_sb, stride_sh, stride_st, stride_origin,
    q_rows, kv_length, q_origin, back, ahead, blocks, rows_of_heads, adjacent, total_heads, scale,
    PACKED: gl.constexpr, GROUP: gl.constexpr, WIDTH: gl.constexpr, V_WIDTH: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """One block of query rows. `q_rows` counts tokens, or tokens times group when PACKED."""
    DTYPE: gl.constexpr = q_descriptor.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, BLOCK_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, V_WIDTH, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    s_rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    o_rows: gl.constexpr = gl.SliceLayout(1, o_layout)

    section = gl.program_id(0) // (blocks * adjacent)
    within = gl.program_id(0) % (blocks * adjacent)
    side = gl.minimum(adjacent, total_heads - section * adjacent)
    block = blocks - 1 - within // side
    head_row = section * adjacent + within % side
    batch = head_row // rows_of_heads
    lane = head_row % rows_of_heads
    kv_head = lane if PACKED else lane // GROUP

    q_shared = gl.allocate_shared_memory(DTYPE, q_descriptor.block_type.shape, q_descriptor.layout)
    k_shared = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, BLOCK_N, WIDTH], k_descriptor.layout)
    v_shared = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, BLOCK_N, V_WIDTH], v_descriptor.layout)
    q_ready = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    first_shared = gl.allocate_shared_memory(DTYPE, [1, 1, BLOCK_N, WIDTH], k_descriptor.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_ready.index(0), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
    _barrier()

    if ORIGIN is not None:
        q_origin += gl.load(ORIGIN + batch * stride_origin).to(gl.int32)
    # Bounds of the block from its first and last row: every row's range moves with its token.
    tokens = q_rows // GROUP if PACKED else q_rows
    first = block * BLOCK_M
    last = gl.minimum(first + BLOCK_M, q_rows) - 1
    first_token = first // GROUP if PACKED else first
    last_token = last // GROUP if PACKED else last
    low = gl.maximum(first_token + q_origin - back, 0)
    high = gl.minimum(last_token + q_origin + ahead + 1, kv_length)
    full_low = gl.maximum(last_token + q_origin - back, 0)
    full_high = gl.minimum(first_token + q_origin + ahead + 1, kv_length)
    tiles = gl.maximum((high - low + BLOCK_N - 1) // BLOCK_N, 1)
    mbarrier.expect(q_ready.index(0), q_descriptor.block_type.nbytes + k_descriptor.block_type.nbytes)
    if PACKED:
        _load(q_descriptor, [batch, lane, first_token, 0, 0], q_ready.index(0), q_shared)
    else:
        _load(q_descriptor, [batch, lane, 0, first, 0], q_ready.index(0), q_shared)
    _load(k_descriptor, [batch, kv_head, low, 0], q_ready.index(0), first_shared)
    for i in gl.static_range(STAGES):
        _fetch_pair(
            k_descriptor, v_descriptor, batch, kv_head, low, i, tiles, ready.index(i), k_shared.index(i),
                v_shared.index(i), BLOCK_N
        )  # fmt: skip

    rows = first + gl.arange(0, BLOCK_M, layout=s_rows)
    token = rows // GROUP if PACKED else rows
    member = rows % GROUP if PACKED else rows * 0
    first_head = lane * GROUP if PACKED else lane
    position = token + q_origin
    row_low = position - back
    row_high = gl.where(rows < q_rows, gl.minimum(position + ahead + 1, kv_length), 0)
    largest = gl.full([BLOCK_M], _LOWEST, gl.float32, s_rows)
    total = gl.full([BLOCK_M], 0.0, gl.float32, s_rows)
    if SINKS is not None:
        places = batch * stride_sb + (first_head + member) * stride_sh + token * stride_st
        sink = gl.load(SINKS + places, mask=rows < q_rows, other=0.0).to(gl.float32) * _LOG2E
        largest = gl.maximum(sink, _LOWEST)
        total = gl.exp2(sink - largest)

    mbarrier.wait(q_ready.index(0), 0)
    q = _flat(q_shared, BLOCK_M, WIDTH, DTYPE)
    nothing = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, s_layout)
    k = _flat(first_shared, BLOCK_N, WIDTH, DTYPE)
    pending = sm90.warpgroup_mma(q, k.permute((1, 0)), nothing, use_acc=False, is_async=True)
    logits = sm90.warpgroup_mma_wait(0, deps=[pending])
    weights, shrink, largest, total = _softmax(
        logits, largest, total, low, row_low, row_high, full_low, full_high, scale, BLOCK_N, s_layout
    )  # fmt: skip
    weights = gl.convert_layout(weights.to(DTYPE), p_layout)
    summed = gl.zeros([BLOCK_M, V_WIDTH], gl.float32, o_layout)
    for tile in range(0, tiles - 1):
        stage = tile % STAGES
        mbarrier.wait(ready.index(stage), (tile // STAGES) & 1)
        k = _flat(k_shared.index(stage), BLOCK_N, WIDTH, DTYPE)
        v = _flat(v_shared.index(stage), BLOCK_N, V_WIDTH, DTYPE)
        # The product with the values runs under the softmax of the next tile.
        pending = sm90.warpgroup_mma(q, k.permute((1, 0)), nothing, use_acc=False, is_async=True)
        adding = sm90.warpgroup_mma(weights, v, summed, is_async=True)
        logits = sm90.warpgroup_mma_wait(1, deps=[pending])
        fresh, shrink, largest, total = _softmax(
            logits, largest, total, low + (tile + 1) * BLOCK_N, row_low, row_high, full_low, full_high, scale,
                BLOCK_N, s_layout
        )  # fmt: skip
        summed = sm90.warpgroup_mma_wait(0, deps=[adding])
        # Every warp is done with this stage before it takes a tile to come. Under a branch this costs 10 % of the loop.
        _barrier()
        _fetch_pair(
            k_descriptor, v_descriptor, batch, kv_head, low, tile + STAGES, tiles,
            ready.index(stage), k_shared.index(stage), v_shared.index(stage), BLOCK_N,
        )  # fmt: skip
        summed = summed * gl.expand_dims(gl.convert_layout(shrink, o_rows), 1)
        weights = gl.convert_layout(fresh.to(DTYPE), p_layout)
    stage = (tiles - 1) % STAGES
    mbarrier.wait(ready.index(stage), ((tiles - 1) // STAGES) & 1)
    v = _flat(v_shared.index(stage), BLOCK_N, V_WIDTH, DTYPE)
    adding = sm90.warpgroup_mma(weights, v, summed, is_async=True)
    summed = sm90.warpgroup_mma_wait(0, deps=[adding])

    inverse = gl.where(total > 0, 1.0 / total, 0.0)
    out = summed * gl.expand_dims(gl.convert_layout(inverse, o_rows), 1)
    heads = rows_of_heads * GROUP if PACKED else rows_of_heads
    lse = gl.where(total > 0, (largest + gl.log2(total)) / _LOG2E, float("-inf"))
    gl.store(LSE + (batch * heads + first_head + member) * tokens + token, lse, mask=rows < q_rows)
    store_layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // V_WIDTH, V_WIDTH // 8], [num_warps, 1], [1, 0])
    out = gl.convert_layout(out.to(DTYPE), store_layout)
    rows = first + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, store_layout))
    token = rows // GROUP if PACKED else rows
    member = rows % GROUP if PACKED else rows * 0
    columns = gl.arange(0, V_WIDTH, layout=gl.SliceLayout(0, store_layout))
    places = token.to(gl.int64) * stride_ot + (first_head + member) * stride_oh
    pointers = OUT + gl.cast(batch, gl.int64) * stride_ob + gl.expand_dims(places, 1) + gl.expand_dims(columns, 0)
    gl.store(pointers, out, mask=gl.expand_dims(rows < q_rows, 1))
