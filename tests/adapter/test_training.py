"""Training through the adapter: every gradient is eager's, the sink's too; checkpointing, autocast, compile."""

from __future__ import annotations

import pytest
import torch

import adapter
from tests.adapter.comparison import logits, relative, under_eager
from tests.families import INSTALLED, build, tokens


def gradients(model, **inputs):
    model.zero_grad()
    logits(model, **inputs).float().pow(2).mean().backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", INSTALLED)
def test_every_gradient_equals_eager(name):
    model, ids = build(name), tokens(2, 13)
    model.set_attn_implementation("eager")
    theirs = gradients(model, input_ids=ids)
    with adapter.adapted(model):
        ours = gradients(model, input_ids=ids)
    assert ours.keys() == theirs.keys()
    assert any("sink" in n for n in ours)
    for parameter, expected in theirs.items():
        # Rounding adds up over the depth of a random model; a wrong gradient of one head is off by its own size.
        scale = max(expected.abs().max().item(), 1e-2)
        assert (ours[parameter] - expected).abs().max() <= 3e-4 * scale, parameter


def test_padded_rows_give_no_gradient_that_is_no_number():
    model, ids = build("gpt_oss"), tokens(2, 13)
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    with adapter.adapted(model):
        assert all(g.isfinite().all() for g in gradients(model, input_ids=ids, attention_mask=mask).values())


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_gives_the_same_gradients(reentrant):
    model, ids = build("gpt_oss").train(), tokens(2, 13)
    adapter.adapt(model)
    expected = gradients(model, input_ids=ids)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    ours = gradients(model, input_ids=ids)
    assert ours.keys() == expected.keys()
    for name, gradient in expected.items():
        assert relative(ours[name], gradient) <= 1e-5, name


def test_autocast():
    model, ids = build("gpt_oss"), tokens(2, 13)
    exact = under_eager(model, lambda m: logits(m, input_ids=ids))

    def run():
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            return logits(model, input_ids=ids)

    theirs = run()
    with adapter.adapted(model):
        ours = run()
    assert relative(ours.float(), exact) <= 2 * relative(theirs.float(), exact) + 1e-3


def test_compiled_in_one_graph():
    # sglang#9832: gpt-oss with torch.compile.
    model, ids = build("granite_swa", num_hidden_layers=2), tokens(2, 13)
    expected = under_eager(model, lambda m: logits(m, input_ids=ids))
    adapter.adapt(model)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad():
        ours = compiled(input_ids=ids, use_cache=False).logits
    assert relative(ours, expected) <= 1e-5
    model.model.layers[0].self_attn.sinks.data.add_(2.0)
    with torch.no_grad():
        assert (compiled(input_ids=ids, use_cache=False).logits - ours).abs().max() > 0.01
