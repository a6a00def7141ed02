"""Models without sinks come out as they were: windows, soft caps, image blocks, chunks, position bias, encoders."""

from __future__ import annotations

import pytest
import torch

import adapter
from tests.adapter.comparison import decode, logits, new_cache, relative, under_adapter, under_eager
from tests.families import tokens
from tests.sinkless import BUILDERS, build

CAUSAL = ["llama", "qwen3", "gemma2", "llama4"]


def inputs_of(name, length=21):
    ids = tokens(2, length)
    inputs = {"input_ids": ids}
    if name == "t5":
        inputs["decoder_input_ids"] = tokens(2, 7, seed=5)
    if name == "gemma3":
        inputs["token_type_ids"] = torch.zeros_like(ids)
    return inputs


@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.parametrize("padded", [False, True])
def test_forward_equals_eager(name, padded):
    model, inputs = build(name), inputs_of(name)
    if padded:
        inputs["attention_mask"] = torch.ones(2, 21, dtype=torch.long)
        inputs["attention_mask"][1, :9] = 0
    real = inputs["attention_mask"].bool() if padded and name != "t5" else ...
    theirs = under_eager(model, lambda m: logits(m, **inputs))
    assert relative(under_adapter(model, lambda m: logits(m, **inputs))[real], theirs[real]) <= 1e-5


@pytest.mark.parametrize("name", CAUSAL)
@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_decode_equals_eager(name, kind):
    model, ids = build(name), tokens(2, 19 + 12)
    run = lambda m: decode(m, ids, 12, new_cache(m, kind, 48))  # noqa: E731
    assert relative(under_adapter(model, run), under_eager(model, run)) <= 1e-5


def test_image_blocks_are_seen_both_ways():
    model = build("gemma3")
    ids = tokens(1, 20)
    ids[0, 5:9] = 120
    types = (ids == 120).long()
    pixels = torch.randn(1, 3, 8, 8)

    def run(m):
        return m(input_ids=ids, pixel_values=pixels, token_type_ids=types, attention_mask=torch.ones_like(ids)).logits

    theirs = under_eager(model, run)
    assert relative(under_adapter(model, run), theirs) <= 1e-5
    causal = under_adapter(model, lambda m: m(input_ids=ids, pixel_values=pixels, token_type_ids=types * 0).logits)
    assert (causal - theirs).abs().max() > 1e-3, "the image block makes no difference in this test"


def test_chunks_hide_what_lies_before_them():
    model, ids = build("llama4"), tokens(1, 21)
    other = ids.clone()
    other[0, 3] = 50
    chunked = model.model.layers[0].self_attn

    captured = []
    with adapter.adapted(model), torch.no_grad():
        handle = chunked.attn.register_forward_hook(lambda m, a, out: captured.append(out[0]))
        for given in (ids, other):
            logits(model, input_ids=given)
        handle.remove()
    assert not torch.equal(captured[0][:, 7], captured[1][:, 7])
    assert torch.equal(captured[0][:, 8:], captured[1][:, 8:])


def test_gemma2_soft_cap_and_window_are_in_the_report():
    report = adapter.adapt(build("gemma2"))
    assert {layer.softcap for layer in report.layers} == {5.0}
    assert {layer.window for layer in report.layers} == {8, None}
    assert not report.sink_layers


def test_a_model_without_attention_has_nothing_to_do():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    report = adapter.adapt(model)
    assert report.layers == ()
    assert "nothing to do" in str(report)
    adapter.restore(model)
