"""Eager and sdpa against the reference over random geometry, masks and sinks, outputs and gradients, in fp64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adapter.backends import registry
from adapter.backends.call import AttentionCall, Visibility

GROUPS = st.sampled_from([(1, 1), (2, 2), (2, 1), (4, 2), (8, 2), (10, 2), (7, 1), (8, 1)])
LEVELS = {"-inf": float("-inf"), "-10": -10.0, "0": 0.0, "2": 2.0, "20": 20.0, "1e4": 1e4}


@st.composite
def calls(draw):
    heads, kv_heads = draw(GROUPS)
    batch, q_length = draw(st.integers(1, 2)), draw(st.sampled_from([1, 7, 64]))
    offset = draw(st.sampled_from([0, 0, 3, 70]))
    kv_length = offset + q_length + draw(st.sampled_from([0, 0, 9]))
    dims = draw(st.sampled_from([(8, 8), (12, 8), (8, 16)]))
    torch.manual_seed(draw(st.integers(0, 9999)))
    new = lambda *shape: torch.randn(shape, dtype=torch.float64, requires_grad=True)  # noqa: E731
    visibility = _visibility(draw, batch, q_length, kv_length, offset)
    return AttentionCall(
        new(batch, heads, q_length, dims[0]),
        new(batch, kv_heads, kv_length, dims[0]),
        new(batch, kv_heads, kv_length, dims[1]),
        0.4,
        visibility,
        sinks=_sinks(draw, batch, heads, q_length),
        bias=torch.randn(1, heads, q_length, kv_length).double() if draw(st.integers(0, 4)) == 0 else None,
    )


def _visibility(draw, batch, q_length, kv_length, offset):
    causal = draw(st.booleans())
    return Visibility(
        batch,
        q_length,
        kv_length,
        q_offset=torch.tensor(offset) if draw(st.integers(0, 3)) == 0 else offset,
        right=0 if causal else draw(st.none() | st.integers(0, 3)),
        left=draw(st.sampled_from([None, 0, 3, q_length - 1, q_length, kv_length + 5])),
        chunk_size=draw(st.sampled_from([None, None, 4, 20])),
        chunk_start=torch.arange(batch) if draw(st.booleans()) else None,
        documents=(3 * torch.rand(batch, q_length)).long() if draw(st.booleans()) and q_length == kv_length else None,
        padding=torch.rand(batch, kv_length) > 0.3 if draw(st.booleans()) else None,
        dense=torch.rand(1, 1, q_length, kv_length) > 0.3 if draw(st.integers(0, 4)) == 0 else None,
    )


def _sinks(draw, batch, heads, q_length):
    kind = draw(st.sampled_from(["none", "per token", "mixed", *LEVELS]))
    if kind == "none":
        return None
    if kind == "per token":
        return (2 + torch.randn(batch, heads, q_length, 1, dtype=torch.float64)).requires_grad_()
    levels = [LEVELS[kind]] if kind in LEVELS else list(LEVELS.values())
    return torch.tensor([levels[h % len(levels)] for h in range(heads)], dtype=torch.float64, requires_grad=True)


def _results(name, call, upstream):
    output = registry.get(name).attend(call).output
    inputs = [t for t in (call.query, call.key, call.value, call.sinks) if t is not None]
    return [output, *torch.autograd.grad(output, inputs, upstream, materialize_grads=True)]


@pytest.mark.parametrize("name", ["eager", "sdpa"])
@settings(max_examples=60, deadline=None)
@given(call=calls())
def test_a_backend_agrees_with_the_reference(name, call):
    upstream = torch.randn(
        *call.query.shape[:1], call.query.shape[2], call.query.shape[1], call.value.shape[3]
    ).double()
    for actual, expected in zip(_results(name, call, upstream), _results("reference", call, upstream), strict=True):
        torch.testing.assert_close(actual, expected, atol=1e-10, rtol=1e-10)
    with torch.no_grad():
        without = registry.get(name).attend(replace(call)).output
        torch.testing.assert_close(without, registry.get("reference").attend(call).output, atol=1e-10, rtol=1e-10)
