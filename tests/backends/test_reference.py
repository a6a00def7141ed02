"""The specification against its closed form, finite differences and a second reference."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.autograd import gradcheck

from adapter.backends.reference import BACKEND

from . import loops
from .helpers import make


def _differentiable(call, names):
    def run(*tensors):
        return BACKEND.attend(replace(call, **dict(zip(names, tensors, strict=True)))).output

    return run, tuple(getattr(call, n).detach().requires_grad_() for n in names)


@pytest.mark.parametrize("kind", ["per head", "per token", "none"])
def test_gradients_are_those_of_finite_differences(kind):
    sinks = {"per head": torch.randn(4) + 2, "per token": torch.randn(2, 4, 3, 1) + 2, "none": None}[kind]
    padding = torch.ones(2, 6, dtype=torch.bool)
    padding[1, :5] = False
    call = make(3, 6, batch=2, dim=3, right=0, left=2, padding=padding, bias=torch.randn(1, 4, 3, 6).double())
    call = replace(call, sinks=None if sinks is None else sinks.double(), softcap=2.0)
    names = ["query", "key", "value", "bias", *(["sinks"] if sinks is not None else [])]
    run, tensors = _differentiable(call, names)
    assert gradcheck(run, tensors)


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_output_equals_the_sums_over_single_numbers(softcap):
    sinks = torch.tensor([2.0, -1.0, 5.0, float("-inf")], dtype=torch.float64)
    bias = torch.randn(2, 4, 5, 9, dtype=torch.float64)
    call = make(5, 9, batch=2, right=0, left=3, padding=torch.rand(2, 9) > 0.4, sinks=sinks, bias=bias)
    call = replace(call, softcap=softcap)
    visible = call.visibility.to_bool(torch.device("cpu")).expand(2, 4, 5, 9).numpy()
    spread = sinks[None, :, None].expand(2, 4, 5).numpy()
    arrays = [t.numpy() for t in (call.query, call.key, call.value)]
    expected = loops.attend(*arrays, call.scale, visible, spread, softcap, bias.numpy())
    assert np.abs(BACKEND.attend(call).output.numpy() - expected).max() < 1e-10


def test_gradients_equal_the_sums_over_single_numbers():
    sinks = torch.randn(2, 4, 5, 1, dtype=torch.float64).add(2).requires_grad_()
    call = make(5, 9, batch=2, right=0, left=3, padding=torch.rand(2, 9) > 0.4, sinks=sinks, grad=True)
    upstream = torch.randn(2, 5, 4, 8, dtype=torch.float64)
    found = torch.autograd.grad(BACKEND.attend(call).output, (call.query, call.key, call.value, sinks), upstream)
    visible = call.visibility.to_bool(torch.device("cpu")).expand(2, 4, 5, 9).numpy()
    arrays = [t.detach().numpy() for t in (call.query, call.key, call.value)]
    expected = loops.gradients(*arrays, call.scale, visible, sinks.detach()[..., 0].numpy(), upstream.numpy())
    for g, e in zip(found, expected, strict=True):
        assert np.abs(g.numpy().reshape(e.shape) - e).max() < 1e-10


def test_the_sink_takes_its_share_of_the_weights():
    call = replace(make(3, 3, sinks=torch.full((4,), 3.0, dtype=torch.float64)), need_weights=True)
    weights = BACKEND.attend(call).weights
    logits = call.scale * call.query @ call.key.repeat_interleave(2, 1).transpose(2, 3)
    total = logits.exp().sum(-1) + torch.tensor(3.0).double().exp()
    torch.testing.assert_close(weights.sum(-1), 1 - torch.tensor(3.0).double().exp() / total)


def test_half_precision_is_computed_in_fp32_and_fp64_is_kept():
    call = make(4, 4, dtype=torch.float64, right=0, sinks=torch.full((4,), 2.0, dtype=torch.float64))
    half = replace(call, query=call.query.bfloat16(), key=call.key.bfloat16(), value=call.value.bfloat16())
    wide = replace(half, query=half.query.float(), key=half.key.float(), value=half.value.float())
    assert BACKEND.attend(call).output.dtype == torch.float64
    assert torch.equal(BACKEND.attend(half).output, BACKEND.attend(wide).output.bfloat16())


def test_dropout_drops_weights_and_never_the_sink():
    call = make(64, 64, sinks=torch.full((4,), 2.0, dtype=torch.float64))
    call = replace(call, value=torch.ones_like(call.value))
    kept = BACKEND.attend(call).output.mean()
    dropped = BACKEND.attend(replace(call, dropout=0.5)).output
    assert dropped.std() > 0.01
    assert abs(dropped.mean() - kept) < 0.02
