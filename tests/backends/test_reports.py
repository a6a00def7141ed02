"""Faults that users of other projects reported, one test each, named by repository and number."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from adapter.backends import registry
from adapter.backends.call import AttentionCall, Visibility

from .helpers import CPU_BACKENDS, attend, make

everywhere = pytest.mark.parametrize("name", CPU_BACKENDS)


@everywhere
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_torchtitan_4796_gradients_with_one_visible_key(name, dtype):
    q, k, v = (torch.full((1, 1, 1, 1), x, dtype=dtype, requires_grad=True) for x in (1.0, 1.0, 2.0))
    sinks = torch.zeros(1, dtype=dtype, requires_grad=True)
    output = attend(name, AttentionCall(q, k, v, 1.0, Visibility(1, 1, 1, right=0), sinks=sinks))
    found = torch.autograd.grad(output.sum(), (q, k, v, sinks))
    expected = (0.39322387, 0.39322387, 0.73105858, -0.39322387)
    assert output.item() == pytest.approx(1.46211716, abs=1e-7)
    assert [g.item() for g in found] == pytest.approx(expected, abs=1e-7)


@everywhere
@pytest.mark.parametrize("with_sink", [True, False])
@pytest.mark.parametrize("how", ["padding", "dense", "bias", "offset", "no keys"])
def test_flash_attention_1797_rows_that_see_no_key_are_zero_with_finite_gradients(name, with_sink, how):
    sinks = torch.full((4,), 2.0, dtype=torch.float64, requires_grad=True) if with_sink else None
    hidden = torch.zeros(1, 5, dtype=torch.bool)
    masks = {"padding": {"padding": hidden}, "dense": {"dense": hidden}, "offset": {"right": 0, "q_offset": -9}}
    bias = torch.full((1, 1, 3, 5), float("-inf"), dtype=torch.float64) if how == "bias" else None
    call = make(3, 0 if how == "no keys" else 5, sinks=sinks, grad=True, bias=bias, **masks.get(how, {}))
    output = attend(name, call)
    assert torch.equal(output, torch.zeros_like(output))
    inputs = [t for t in (call.query, call.key, call.value, sinks) if t is not None]
    for gradient in torch.autograd.grad(output.sum(), inputs, materialize_grads=True):
        assert torch.equal(gradient, torch.zeros_like(gradient))


@everywhere
def test_flash_attention_1973_an_empty_row_beside_a_full_one(name):
    sinks = torch.full((4,), 2.0, dtype=torch.float64, requires_grad=True)
    padding = torch.tensor([[False, False, True, True, True]])
    call = make(5, 5, sinks=sinks, grad=True, right=0, padding=padding)
    output = attend(name, call)
    assert not output[:, :2].any()
    alone = call.narrow(2, 5, 2, 5)
    torch.testing.assert_close(output[:, 2:], attend("reference", alone))
    for gradient in torch.autograd.grad(output.sum(), (call.query, call.key, call.value, sinks)):
        assert gradient.isfinite().all()


@pytest.mark.parametrize("pieces", [1, 2, 3, 7])
def test_sglang_40903_joining_pieces_with_the_sink_once_gives_the_whole(pieces):
    """Sink-free pieces carry natural log-sum-exps; the sink joins after them, counted once, whatever their number."""
    from adapter.backends.sdpa_math import forward

    sinks = torch.full((4,), 3.0, dtype=torch.float64)
    call = make(2, 21, left=6, right=0)
    outputs, lses = [], []
    for columns in torch.arange(21).tensor_split(pieces):
        part = call.narrow(0, 2, int(columns[0]), int(columns[-1]) + 1)
        output, lse = forward(part)
        seen = part.visibility.to_bool(torch.device("cpu")).any(-1)[..., :]
        outputs.append(output)
        lses.append(lse.masked_fill(~seen.expand_as(lse), float("-inf")))
    total = torch.logsumexp(torch.stack([*lses, sinks[None, :, None].expand_as(lses[0])]), dim=0)
    shares = [torch.exp(lse - total).transpose(1, 2)[..., None] for lse in lses]
    joined = sum(o * s for o, s in zip(outputs, shares, strict=True))
    torch.testing.assert_close(joined, attend("reference", replace(call, sinks=sinks)))


@pytest.mark.parametrize("sink", [-1e4, -50.0, -3.0, 0.0, 3.0, 50.0, 1e4])
def test_torchtitan_2211_the_sigmoid_form_equals_the_extra_column(sink):
    sinks = torch.full((4,), sink, dtype=torch.float64)
    call = make(6, 6, right=0, sinks=sinks)
    lse = (call.scale * call.query @ call.key.repeat_interleave(2, 1).transpose(2, 3)).masked_fill(
        ~call.visibility.to_bool(torch.device("cpu")), float("-inf")
    )
    share = torch.sigmoid(lse.logsumexp(-1) - sink).transpose(1, 2)[..., None]
    expected = attend("reference", replace(call, sinks=None)) * share
    for name in CPU_BACKENDS:
        torch.testing.assert_close(attend(name, call), expected, atol=1e-14, rtol=1e-12)


@everywhere
@pytest.mark.parametrize("window", [1, 2, 5, 40, 64])
@pytest.mark.parametrize("q_length", [1, 64])
def test_transformers_29623_a_window_of_w_sees_w_tokens(name, window, q_length):
    """With equal logits and one-hot values the output counts how far back a query sees."""
    call = make(q_length, 64, heads=2, kv_heads=1, dim=64, left=window - 1, right=0)
    call = replace(call, key=torch.zeros_like(call.key), value=torch.eye(64, dtype=torch.float64)[None, None])
    weights = attend(name, call)[0, :, 0]
    for row in range(q_length):
        position = 64 - q_length + row
        seen = weights[row].nonzero().flatten().tolist()
        assert seen == list(range(max(0, position - window + 1), position + 1))


@everywhere
@pytest.mark.parametrize("q_length", [1, 7, 40])
@pytest.mark.parametrize("left", [None, 4])
def test_vllm_30887_what_lies_outside_the_causal_bound_and_the_window_may_be_nan(name, q_length, left):
    sinks = torch.full((4,), 2.0, dtype=torch.float64)
    call = make(q_length, 60, right=0, left=left, q_offset=10, sinks=sinks)
    first = 0 if left is None else 10 - left
    clean = attend(name, call.narrow(0, q_length, first, 10 + q_length))
    for tensor in (call.key, call.value):
        tensor[:, :, 10 + q_length :] = float("nan")
        tensor[:, :, :first] = float("nan")
    torch.testing.assert_close(attend(name, call), clean, atol=1e-12, rtol=1e-12)


def test_tt_metal_35817_in_the_reference_no_hidden_row_may_hurt():
    padding = torch.ones(1, 9, dtype=torch.bool)
    padding[0, 3:6] = False
    call = make(4, 9, right=0, padding=padding, sinks=torch.full((4,), 2.0, dtype=torch.float64))
    clean = attend("reference", call)
    call.key[:, :, 3:6], call.value[:, :, 3:6] = float("nan"), float("inf")
    assert torch.equal(attend("reference", call), clean)


@everywhere
@pytest.mark.parametrize("chunk", [1, 8, 13, 32])
def test_sglang_11634_prefill_in_chunks_equals_prefill_at_once(name, chunk):
    sinks = torch.tensor([2.0, 4.0, -1.0, 20.0], dtype=torch.float64)
    call = make(40, 40, right=0, left=6, sinks=sinks)
    pieces = [attend(name, call.narrow(a, min(a + chunk, 40), 0, min(a + chunk, 40))) for a in range(0, 40, chunk)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), attend("reference", call))


@everywhere
def test_transformers_29075_left_padded_rows_equal_the_rows_alone(name):
    lengths, sinks = (3, 17, 5), torch.tensor([2.0, 4.0, -1.0, 6.0], dtype=torch.float64)
    padding = torch.arange(17)[None] >= 17 - torch.tensor(lengths)[:, None]
    call = make(17, 17, batch=3, right=0, left=7, padding=padding, sinks=sinks)
    output = attend(name, call)
    for row, n in enumerate(lengths):
        q, k, v = (t[row : row + 1, :, 17 - n :] for t in (call.query, call.key, call.value))
        alone = AttentionCall(q, k, v, call.scale, Visibility(1, n, n, right=0, left=7), sinks=sinks)
        torch.testing.assert_close(output[row : row + 1, 17 - n :], attend("reference", alone))


def test_sglang_9832_attention_compiles_into_one_graph():
    def attention(q, k, v, sinks):
        visibility = Visibility(q.shape[0], q.shape[2], k.shape[2], q_offset=k.shape[2] - q.shape[2], right=0, left=5)
        return registry.get("sdpa").attend(AttentionCall(q, k, v, 0.3, visibility, sinks=sinks)).output

    sinks = torch.full((4,), 2.0, requires_grad=True)
    call = make(7, 9, dtype=torch.float32, grad=True)
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    inputs = (call.query, call.key, call.value, sinks)
    output, expected = compiled(*inputs), attention(*inputs)
    assert torch.equal(output, expected)
    gradients = (torch.autograd.grad(o.square().sum(), inputs) for o in (output, expected))
    for actual, wanted in zip(*gradients, strict=True):
        torch.testing.assert_close(actual, wanted)
