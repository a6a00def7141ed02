"""Device functions that every kernel shares: which columns a row may see, tile loads, soft-capping."""

# Triton reads the source of these functions, so their arguments carry no annotations.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-1.0e30)
"""Finite stand-in for the logit of a sink that is -inf, so that no maximum is ever -inf."""
UNLIMITED = 1 << 30
"""A distance that limits nothing."""


@triton.jit
def interval(index, origin, other_origin, back, ahead, other_length, CHUNK_START, batch, chunk, CHUNKED: tl.constexpr):
    """The half-open range of the other side's indices that `index` may meet: window, causality, chunk and length at
    once."""
    position = index + (origin - other_origin)
    low = tl.maximum(position - back, 0)
    high = tl.minimum(position + ahead + 1, other_length)
    if CHUNKED:
        start = 0
        if CHUNK_START is not None:
            start = tl.load(CHUNK_START + batch).to(tl.int32)
        place = index + (origin - start)
        number = place // chunk
        # Integer division truncates on the device; positions before the first chunk are negative.
        number -= tl.where(place < number * chunk, 1, 0)
        begin = number * chunk + (start - other_origin)
        low = tl.maximum(low, begin)
        high = tl.minimum(high, begin + chunk)
    return low, high


@triton.jit
def device_origin(ORIGIN, origin, batch, stride_origin):
    """The position of the first query: a host number plus, where one is given, a number kept on the device."""
    if ORIGIN is not None:
        origin += tl.load(ORIGIN + batch * stride_origin).to(tl.int32)
    return origin


@triton.jit
def load_tile(base, rows, stride, rows_end, first, WIDTH: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """A [rows, BLOCK] tile of a matrix, columns from `first`; what lies outside WIDTH or, when MASKED, `rows_end` is
    0."""
    columns = first + tl.arange(0, BLOCK)
    pointers = base + rows[:, None] * stride + columns[None, :]
    if first + BLOCK > WIDTH:
        if MASKED:
            return tl.load(pointers, mask=(rows[:, None] < rows_end) & (columns[None, :] < WIDTH), other=0.0)
        return tl.load(pointers, mask=columns[None, :] < WIDTH, other=0.0)
    if MASKED:
        return tl.load(pointers, mask=rows[:, None] < rows_end, other=0.0)
    return tl.load(pointers)


@triton.jit
def store_tile(base, rows, rows_valid, tile, first, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Store a [rows, BLOCK] tile at row offsets `rows`, columns from `first`."""
    columns = first + tl.arange(0, BLOCK)
    mask = rows_valid[:, None]
    if first + BLOCK > WIDTH:
        mask = mask & (columns[None, :] < WIDTH)
    tl.store(base + rows[:, None] + columns[None, :], tile.to(base.dtype.element_ty), mask=mask)


@triton.jit
def soft_capped(logits, softcap):
    """softcap * tanh(logits / softcap), written with one exponential."""
    return softcap * (1.0 - 2.0 / (tl.exp2(logits * (2.0 * LOG2E / softcap)) + 1.0))


@triton.jit
def sink_logits(SINKS, batch, head, token, stride_b, stride_h, stride_t, valid):
    """Sinks in base 2, one for each row; LOWEST where there is none. Never scaled, capped or masked."""
    raw = tl.load(SINKS + batch * stride_b + head * stride_h + token * stride_t, mask=valid, other=0.0)
    return raw.to(tl.float32) * LOG2E


@triton.jit
def load_rows(base, offsets, valid, first, WIDTH: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr = True):
    """A [rows, BLOCK] tile at row offsets `offsets`, columns from `first`; when MASKED, rows that are not valid are
    0."""
    columns = first + tl.arange(0, BLOCK)
    pointers = base + offsets[:, None] + columns[None, :]
    if first + BLOCK > WIDTH:
        if MASKED:
            return tl.load(pointers, mask=valid[:, None] & (columns[None, :] < WIDTH), other=0.0)
        return tl.load(pointers, mask=columns[None, :] < WIDTH, other=0.0)
    if MASKED:
        return tl.load(pointers, mask=valid[:, None], other=0.0)
    return tl.load(pointers)
