"""Each way of handing over a sink or keyword that would be dropped is an error with a text that says what to do."""

from __future__ import annotations

import pytest
import torch

import adapter
from adapter.attention import registered_attention, sinkhold_attention
from adapter.errors import CallError, SinkError
from adapter.guard import check_call, check_heads, check_sinks
from tests.families import build, tokens


@pytest.fixture
def layer():
    model = build("gpt_oss")
    adapter.adapt(model)
    module = model.model.layers[0].self_attn
    yield module, registered_attention(module)
    adapter.restore(model)


@pytest.fixture
def sinkless():
    model = build("mimo_v2_flash")
    adapter.adapt(model)
    module = model.model.layers[0].self_attn
    yield module, registered_attention(module)
    adapter.restore(model)


@pytest.fixture
def per_token():
    model = build("inkling2")
    adapter.adapt(model)
    module = model.model.language_model.layers[0].self_attn
    yield module, registered_attention(module)
    adapter.restore(model)


def raises(kind, text):
    return pytest.raises(kind, match=text)


def test_the_registered_sink_passes(layer):
    module, attn = layer
    check_sinks(module, attn, module.sinks)
    assert attn.sinks is module.sinks


def test_a_view_of_the_registered_sink_passes(layer):
    module, attn = layer
    check_sinks(module, attn, module.sinks.view(-1, 1))


def test_registered_but_not_passed(layer):
    with raises(SinkError, "the sink sinks is registered, but the call passes none"):
        check_sinks(*layer, None)


def test_another_tensor(layer):
    module, attn = layer
    with raises(SinkError, "another tensor than the registered sink sinks"):
        check_sinks(module, attn, module.sinks.detach().clone())


def test_a_part_of_the_registered_sink(layer):
    module, attn = layer
    with raises(SinkError, "the call passes 2 sinks, but 4 are registered"):
        check_sinks(module, attn, module.sinks[:2])


def test_a_sink_that_went_from_the_module(layer):
    module, attn = layer
    sink = module.sinks
    del module.sinks
    with raises(SinkError, "sinks is gone from the module"):
        check_sinks(module, attn, sink)


def test_passed_but_not_registered(sinkless):
    with raises(SinkError, r"passes a sink of shape \[4\], but none is registered"):
        check_sinks(*sinkless, torch.zeros(4))


def test_per_token_sink_missing_or_of_another_shape(per_token):
    check_sinks(*per_token, torch.zeros(1, 4, 5, 1))
    with raises(SinkError, "a per-token sink is registered .*, but the call passes none"):
        check_sinks(*per_token, None)
    with raises(SinkError, r"has shape \[batch, heads, queries, 1\], but the call passes \[4\]"):
        check_sinks(*per_token, torch.zeros(4))


def test_sinks_of_one_shard_and_heads_of_another(layer):
    # transformers S14: one sink a rank is broadcast over all heads in silence.
    module, attn = layer
    with raises(SinkError, "1 sinks for 4 query heads"):
        check_heads(module, attn, torch.zeros(1, 4, 3, 16), torch.zeros(1))
    with raises(SinkError, "2 sinks for 4 query heads"):
        check_heads(module, attn, torch.zeros(1, 4, 3, 16), torch.zeros(1, 2, 3, 1))
    check_heads(module, attn, torch.zeros(1, 4, 3, 16), torch.zeros(4))


@pytest.mark.parametrize("keyword", ["block_indices", "sink_bias", "alibi"])
def test_an_unknown_keyword_is_an_error_unless_it_is_none(layer, keyword):
    check_call(*layer, {keyword: None})
    with raises(CallError, f"passes {keyword}= to its attention, which no backend here applies"):
        check_call(*layer, {keyword: torch.zeros(1)})


@pytest.mark.parametrize(("keyword", "value"), [("scaling", 0.5), ("sliding_window", 9)])
def test_a_value_that_differs_from_the_registered_one_is_an_error(layer, keyword, value):
    with raises(CallError, f"passes {keyword}={value}, but .* is registered"):
        check_call(*layer, {keyword: value})


def test_two_sinks_in_one_call(layer):
    module, _ = layer
    q, kv = torch.zeros(1, 4, 3, 16), torch.zeros(1, 2, 3, 16)
    with raises(SinkError, "two sinks, s_aux= and sinks="):
        sinkhold_attention(module, q, kv, kv, None, s_aux=module.sinks, sinks=torch.zeros(1, 4, 3, 1))


def test_too_many_positional_arguments(layer):
    module, _ = layer
    q, kv = torch.zeros(1, 4, 3, 16), torch.zeros(1, 2, 3, 16)
    with raises(CallError, "the call passes 8 positional arguments"):
        sinkhold_attention(module, q, kv, kv, None, 0.25, 0.0, module.sinks)


@pytest.mark.parametrize(
    ("mask", "text"),
    [
        (torch.ones(1, 3), r"the mask is a Tensor of shape \[1, 3\], which has no meaning here"),
        ({"full_attention": None}, "the mask is a dict, which has no meaning here"),
        (torch.ones(1, 1, 3, 4), r"the mask has shape \[1, 1, 3, 4\], the call has 3 queries and 3 keys"),
    ],
)
def test_a_mask_without_a_meaning_is_an_error(layer, mask, text):
    module, _ = layer
    q, kv = torch.zeros(1, 4, 3, 16), torch.zeros(1, 2, 3, 16)
    with raises(CallError, text):
        sinkhold_attention(module, q, kv, kv, mask, s_aux=module.sinks, scaling=0.25)


def test_a_lazy_mask_of_other_lengths_is_an_error(layer):
    from adapter.masks import sinkhold_mask

    module, _ = layer
    q, kv = torch.zeros(1, 4, 3, 16), torch.zeros(1, 2, 3, 16)
    mask = sinkhold_mask(batch_size=1, q_length=3, kv_length=9, q_offset=6)
    with raises(CallError, "the mask is for 3 queries and 9 keys, the call has 3 and 3"):
        sinkhold_attention(module, q, kv, kv, mask, s_aux=module.sinks, scaling=0.25)


def test_the_guard_runs_in_every_forward():
    model = build("gpt_oss")
    with adapter.adapted(model):
        model.model.layers[2].self_attn.attn.finding = _without_sink(model.model.layers[2].self_attn.attn)
        with raises(SinkError, "but none is registered for this layer"):
            model(input_ids=tokens(1, 5))


def _without_sink(attn):
    from dataclasses import replace

    from fusers.base import NO_SINK

    attn.sink_kind = NO_SINK.kind
    return replace(attn.finding, sink=NO_SINK)


def test_errors_name_code_place_reason_and_remedy(layer):
    with pytest.raises(SinkError) as caught:
        check_sinks(*layer, None)
    text = str(caught.value)
    assert text.startswith("[SINK-201]")
    assert "model.layers.0.self_attn" in text
    assert "modeling_gpt_oss.py:" in text
    assert "why:" in text
    assert "fix:" in text
