"""The parts of flex that need no GPU: its masks and scores as functions of indices, and the join with the sink."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings

from adapter.backends import contract, flex, registry
from adapter.errors import BackendError

from .helpers import attend, make
from .test_call import visibilities


def _grid(batch, heads, q_length, kv_length):
    sizes = (batch, heads, q_length, kv_length)
    return [torch.arange(n).reshape([-1 if a == d else 1 for a in range(4)]) for d, n in enumerate(sizes)]


@settings(max_examples=100, deadline=None)
@given(visibilities())
def test_the_mask_function_is_the_mask(v):
    seen = flex.mask_mod(v)(*_grid(v.batch_size, 1, v.q_length, v.kv_length))
    mask = v.to_bool(torch.device("cpu"))
    mask = torch.ones(1, 1, 1, 1, dtype=torch.bool) if mask is None else mask
    shape = (v.batch_size, 1, v.q_length, v.kv_length)
    assert torch.equal(seen.expand(shape), mask.expand(shape))


@pytest.mark.parametrize("shape", [(1, 4, 6, 9), (2, 1, 6, 9), (6, 9), (1, 9)])
def test_the_score_function_caps_before_it_adds_the_bias(shape):
    call = replace(make(6, 9, batch=2, bias=torch.randn(shape, dtype=torch.float64)), softcap=2.0)
    scores = 3 * torch.randn(2, 4, 6, 9, dtype=torch.float64)
    changed = flex.score_mod(call)(scores, *_grid(2, 4, 6, 9))
    torch.testing.assert_close(changed, 2 * torch.tanh(scores / 2) + call.bias)
    assert flex.score_mod(make(1, 1)) is None


def test_the_join_is_the_reference_also_for_rows_that_see_nothing():
    padding = torch.tensor([[False] * 5, [False, True, True, True, True]])
    sinks = torch.tensor([2.0, float("-inf"), 1e4, -3.0], dtype=torch.float64, requires_grad=True)
    call = make(5, 5, batch=2, right=0, padding=padding, sinks=sinks)
    logits = call.scale * call.query @ call.key.repeat_interleave(2, 1).transpose(2, 3)
    lse = logits.masked_fill(~call.visibility.to_bool(torch.device("cpu")), float("-inf")).logsumexp(3)
    lse.requires_grad_()
    out = attend("reference", replace(call, sinks=None)).transpose(1, 2)
    joined = flex.join(out, lse, sinks)
    torch.testing.assert_close(joined.transpose(1, 2), attend("reference", call))
    for gradient in torch.autograd.grad(joined.sum(), (lse, sinks)):
        assert gradient.isfinite().all()


def test_on_the_cpu_it_says_why_not():
    with pytest.raises(BackendError, match="no log-sum-exp on cpu"):
        flex.BACKEND.attend(make(3, 3))
    if not torch.cuda.is_available():
        assert "returns no log-sum-exp on the CPU" in flex.BACKEND.unavailable()


@pytest.mark.gpu
@pytest.mark.slow
def test_contract_on_the_gpu():
    for case in contract.cases(registry.get("flex").capability, "cuda")[::4]:
        contract.check(registry.get("flex"), case)
