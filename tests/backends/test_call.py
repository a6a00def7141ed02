"""The meaning of a Visibility, field by field, against loops; and its slices against slices of its mask."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adapter.backends.call import Visibility

from .helpers import attend, make

CPU = torch.device("cpu")


@st.composite
def visibilities(draw):
    batch, q_length, extra = draw(st.integers(1, 2)), draw(st.integers(1, 9)), draw(st.integers(0, 6))
    kv_length = q_length + extra
    maybe = lambda s: draw(st.none() | s)  # noqa: E731
    seed = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    return Visibility(
        batch,
        q_length,
        kv_length,
        q_offset=draw(st.integers(0, 8)),
        kv_offset=draw(st.integers(0, 3)),
        left=maybe(st.integers(0, 6)),
        right=maybe(st.integers(0, 3)),
        chunk_size=maybe(st.integers(1, 5)),
        chunk_start=torch.randint(0, 4, (batch,), generator=seed) if draw(st.booleans()) else None,
        documents=torch.randint(0, 3, (batch, kv_length), generator=seed)
        if draw(st.booleans()) and not extra
        else None,
        padding=torch.rand(batch, kv_length, generator=seed) > 0.3 if draw(st.booleans()) else None,
        dense=torch.rand(1, 1, q_length, kv_length, generator=seed) > 0.3 if draw(st.booleans()) else None,
    )


def _sees(v: Visibility, b: int, i: int, j: int) -> bool:
    q, k = v.q_offset + i, v.kv_offset + j
    start = 0 if v.chunk_start is None else int(v.chunk_start[b])
    return all(
        [
            v.left is None or q - k <= v.left,
            v.right is None or k - q <= v.right,
            v.chunk_size is None or (q - start) // v.chunk_size == (k - start) // v.chunk_size,
            v.documents is None or bool(v.documents[b, i] == v.documents[b, j]),
            v.padding is None or bool(v.padding[b, j]),
            v.dense is None or bool(v.dense[0, 0, i, j]),
        ]
    )


@settings(max_examples=150, deadline=None)
@given(visibilities())
def test_the_mask_is_the_fields_taken_together(v):
    mask = v.to_bool(CPU)
    mask = torch.ones(1, 1, 1, 1, dtype=torch.bool) if mask is None else mask
    mask = mask.expand(v.batch_size, 1, v.q_length, v.kv_length)
    expected = [
        [[_sees(v, b, i, j) for j in range(v.kv_length)] for i in range(v.q_length)] for b in range(v.batch_size)
    ]
    assert mask[:, 0].tolist() == expected


@settings(max_examples=150, deadline=None)
@given(visibilities(), st.data())
def test_a_slice_sees_what_the_whole_saw_and_the_key_range_holds_it_all(v, data):
    start = data.draw(st.integers(0, v.q_length - 1))
    stop = data.draw(st.integers(start + 1, v.q_length))
    kv_start, kv_stop = v.kv_range(start, stop)
    whole = v.to_bool(CPU)
    if whole is None:
        assert (kv_start, kv_stop) == (0, v.kv_length)
        return
    rows = whole[..., start:stop, :]
    assert not rows[..., :kv_start].any()
    assert not rows[..., kv_stop:].any()
    part = v.narrow(start, stop, kv_start, kv_stop).to_bool(CPU)
    assert torch.equal(part, rows[..., kv_start:kv_stop])


def test_a_window_of_w_tokens_counts_the_query_itself():
    mask = Visibility(1, 4, 4, left=1, right=0).to_bool(CPU)[0, 0]
    assert mask.int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]


def test_a_position_on_the_device_means_the_same_as_an_integer():
    fields = {"left": 3, "right": 0, "chunk_size": 4}
    host, device = Visibility(1, 3, 12, q_offset=6, **fields), Visibility(1, 3, 12, q_offset=torch.tensor(6), **fields)
    assert torch.equal(host.to_bool(CPU), device.to_bool(CPU))
    assert device.kv_range() == (0, 12)


@pytest.mark.parametrize("shape", [(1, 4, 6, 9), (2, 1, 6, 9), (6, 9), (1, 1, 1, 9), (4, 6, 1), (1, 1)])
def test_a_narrowed_call_slices_bias_and_sinks_as_they_broadcast(shape):
    sinks = torch.randn(2, 4, 6, 1, dtype=torch.float64)
    call = make(6, 9, batch=2, sinks=sinks, bias=torch.randn(shape, dtype=torch.float64))
    part = call.narrow(2, 5, 0, 9)
    torch.testing.assert_close(attend("reference", part), attend("reference", call)[:, 2:5])
    hidden = replace(call, visibility=call.visibility.with_(dense=torch.arange(9) >= 4))
    torch.testing.assert_close(attend("reference", call.narrow(0, 6, 4, 9)), attend("reference", hidden))
