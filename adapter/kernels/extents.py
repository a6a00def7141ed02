"""Where documents and padding let a block of rows begin and end, found on the device so that no mask is built."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .masking import Masking
from .shapes import ceil_div

_STEP = 128


@triton.jit(do_not_specialize=["own_length", "other_length", "blocks"])
def _extents(
    OWN_DOCUMENTS, OTHER_DOCUMENTS, PADDING, OUT, own_length, other_length, blocks,
    ROWS: tl.constexpr, GROUP: tl.constexpr, OWN: tl.constexpr, STEP: tl.constexpr, OWN_ARE_KEYS: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    batch = tl.program_id(1).to(tl.int64)
    begin = block * ROWS // GROUP
    end = tl.minimum(((block + 1) * ROWS - 1) // GROUP + 1, own_length)
    own = begin + tl.arange(0, OWN)
    least = -2147483647
    most = 2147483647
    any_own = 1
    all_own = 1
    if OWN_DOCUMENTS is not None:
        OTHER_DOCUMENTS += batch * other_length
        ids = tl.load(OWN_DOCUMENTS + batch * own_length + own, mask=own < end, other=0).to(tl.int32)
        least = tl.min(tl.where(own < end, ids, 2147483647), 0)
        most = tl.max(tl.where(own < end, ids, -2147483647), 0)
    if PADDING is not None:
        PADDING += batch * (own_length if OWN_ARE_KEYS else other_length)
        if OWN_ARE_KEYS:
            any_own = tl.max(tl.load(PADDING + own, mask=own < end, other=0).to(tl.int32), 0)
            all_own = tl.min(tl.load(PADDING + own, mask=own < end, other=1).to(tl.int32), 0)
    low = other_length
    high = 0
    full_low = other_length
    full_high = 0
    for start in tl.range(0, other_length, STEP):
        other = start + tl.arange(0, STEP)
        inside = other < other_length
        meets = any_own > 0
        whole = (all_own > 0) & (start + STEP <= other_length)
        if OWN_DOCUMENTS is not None:
            its = tl.load(OTHER_DOCUMENTS + other, mask=inside, other=0).to(tl.int32)
            first = tl.min(tl.where(inside, its, 2147483647), 0)
            last = tl.max(tl.where(inside, its, -2147483647), 0)
            meets = meets & (first <= most) & (last >= least)
            whole = whole & (first == least) & (last == most) & (first == last)
        if PADDING is not None and not OWN_ARE_KEYS:
            real = tl.load(PADDING + other, mask=inside, other=0).to(tl.int32)
            meets = meets & (tl.max(real, 0) > 0)
            whole = whole & (tl.min(real, 0) > 0)
        low = tl.where(meets, tl.minimum(low, start), low)
        high = tl.where(meets, start + STEP, high)
        # The first unbroken run of tiles that every row sees wholly.
        opens = whole & (full_high == 0)
        full_low = tl.where(opens, start, full_low)
        full_high = tl.where(opens | (whole & (full_high == start)), start + STEP, full_high)
    out = OUT + (batch * blocks + block) * 4
    tl.store(out, low)
    tl.store(out + 1, tl.minimum(high, other_length))
    tl.store(out + 2, full_low)
    tl.store(out + 3, full_high)


def _run(
    own_documents: Tensor | None,
    other_documents: Tensor | None,
    padding: Tensor | None,
    own: int,
    other: int,
    rows: int,
    group: int,
    keys: bool,
) -> Tensor:
    given = own_documents if own_documents is not None else padding
    assert given is not None
    blocks = ceil_div(own * group, rows)
    out = torch.empty(given.shape[0], blocks, 4, dtype=torch.int32, device=given.device)
    tokens = triton.next_power_of_2(ceil_div(rows, group) + 1)
    # fmt: off
    _extents[(blocks, given.shape[0])](
        own_documents, other_documents, None if padding is None else padding.view(torch.uint8), out, own, other, blocks,
        ROWS=rows, GROUP=group, OWN=tokens, STEP=_STEP, OWN_ARE_KEYS=keys, num_warps=4,
    )
    # fmt: on
    return out


def query_extents(masking: Masking, q_length: int, kv_length: int, rows: int, group: int) -> Tensor | None:
    """For every block of `rows` query rows (`group` rows a token) the keys [low, high) it can meet and a wholly visible
    range.

    Returns:
        [batch, blocks, 4] int32: low, high, full low, full high; None where no tensor limits anything.
    """
    if not masking.has_extents:
        return None
    return _run(
        masking.query_documents, masking.documents, masking.padding, q_length, kv_length, rows, group, keys=False
    )  # fmt: skip


def key_extents(masking: Masking, q_length: int, kv_length: int, rows: int) -> Tensor | None:
    """For every block of `rows` keys the query tokens [low, high) that can meet it and a range that meets all of it.

    Returns:
        [batch, blocks, 4] int32; None where no tensor limits anything.
    """
    if not masking.has_extents:
        return None
    return _run(
        masking.documents, masking.query_documents, masking.padding, kv_length, q_length, rows, 1, keys=True
    )  # fmt: skip
