"""What plain transformers gets wrong without an error, one test each: through the adapter it is right, or an error."""

from __future__ import annotations

import contextlib

import pytest
import torch
import transformers
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.monkey_patching import get_patch_mapping

import adapter
from adapter.errors import AdaptError, CheckpointError, SinkError
from tests.adapter.comparison import decode, logits, new_cache, relative, under_adapter, under_eager
from tests.families import INSTALLED, build, save, tokens

IDS = tokens(2, 15)


def forward(model):
    return logits(model, input_ids=IDS)


def padded(model):
    """Logits of the second row, whose first five tokens are padding."""
    mask = torch.ones(2, 15, dtype=torch.long)
    mask[1, :5] = 0
    return logits(model, input_ids=IDS, attention_mask=mask)[1, 5:]


def small(name, **overrides):
    if name == "gpt_oss":
        overrides.setdefault("num_hidden_layers", 2)
    return build(name, **overrides)


@pytest.fixture
def deaf():
    """An attention function that ignores the sink, with a mask of its own."""

    def attend(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **ignored):
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout)

    AttentionInterface.register("deaf", attend)
    AttentionMaskInterface.register("deaf", masking_utils.sdpa_mask)
    yield "deaf"
    del AttentionInterface._global_mapping["deaf"]
    AttentionMaskInterface._global_mapping.pop("deaf", None)


def wrong_and_right(model, implementation, run):
    """How far plain transformers is off under an implementation, and how far the same model is off once adapted."""
    theirs = under_eager(model, run)
    model.config._attn_implementation = implementation
    with torch.no_grad():
        plain = run(model)
        with adapter.adapted(model):
            ours = run(model)
        assert torch.equal(run(model), plain)
    return relative(plain, theirs), relative(ours, theirs)


@pytest.mark.parametrize("name", ["gpt_oss", "granite_swa", "flint", "mimo_v2_flash"])
def test_s1_a_function_that_ignores_the_sink(deaf, name):
    wrong, right = wrong_and_right(small(name), deaf, forward)
    assert wrong > 0.1
    assert right <= 1e-5


@pytest.mark.parametrize("name", ["gpt_oss", "granite_swa"])
def test_s2_a_function_without_a_mask(deaf, name):
    del AttentionMaskInterface._global_mapping[deaf]
    wrong, right = wrong_and_right(small(name), deaf, padded)
    assert wrong > 0.1
    assert right <= 1e-5


@pytest.mark.parametrize(
    "name", ["gpt_oss", "openai_privacy_filter", "granite_swa", "mimo_v2_flash", "hy_v4", "hy_v4_vl"]
)
def test_s4_paged_attention_in_a_plain_forward(name):
    model = small(name)
    theirs = under_eager(model, padded)
    model.config._attn_implementation = "paged|eager"
    with torch.no_grad():
        # Some models, and all in other versions of transformers, at least do not run.
        with contextlib.suppress(ValueError, TypeError, AttributeError):
            assert relative(padded(model), theirs) > 0.1
        with adapter.adapted(model):
            assert relative(padded(model), theirs) <= 1e-5


@pytest.mark.parametrize("name", ["inkling2", "inkling2_loop"])
def test_s5_a_sink_called_sinks(deaf, name):
    model = small(name)
    theirs = under_eager(model, forward)
    model.config.get_text_config()._attn_implementation = deaf
    with torch.no_grad():
        assert relative(forward(model), theirs) > 0.1
        with adapter.adapted(model):
            assert relative(forward(model), theirs) <= 1e-5


@pytest.mark.parametrize("kernel", ["owner/attention", "owner/attention@v1:attend", "owner/flash-attention"])
def test_s6_a_hub_kernel_is_refused_before_anything_is_loaded(kernel):
    with pytest.raises(AdaptError, match="names another attention"):
        adapter.AutoModelForCausalLM.from_pretrained(
            "no/such-model", attn_implementation=kernel, allow_all_kernels=True
        )


@pytest.mark.parametrize("name", ["gpt_oss", "openai_privacy_filter"])
@pytest.mark.parametrize("told", ["position_ids", "cu_seq_lens"])
def test_s8_packed_documents(name, told):
    model, ids = small(name), tokens(1, 15)
    positions = torch.cat([torch.arange(6), torch.arange(9)])[None]
    bounds = torch.tensor([0, 6, 15], dtype=torch.int32)
    more = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": 9, "max_length_k": 9}
    inputs = {"input_ids": ids, "position_ids": positions, **(more if told == "cu_seq_lens" else {})}
    alone = under_eager(model, lambda m: logits(m, input_ids=ids[:, 6:]))
    assert relative(under_eager(model, lambda m: logits(m, **inputs))[:, 6:], alone) > 0.1
    assert relative(under_adapter(model, lambda m: logits(m, **inputs))[:, 6:], alone) <= 1e-5


def test_s8_rows_that_are_packed_differently():
    model = small("gpt_oss")
    positions = torch.stack([torch.cat([torch.arange(6), torch.arange(9)]), torch.arange(15)])
    packed = under_adapter(model, lambda m: logits(m, input_ids=IDS, position_ids=positions))
    alone = under_eager(model, lambda m: logits(m, input_ids=IDS[:1, 6:]))
    assert relative(packed[:1, 6:], alone) <= 1e-5
    assert relative(packed[1], under_eager(model, forward)[1]) <= 1e-5


def test_s9_a_bool_mask_where_the_model_adds_to_its_mask(deaf):
    """deepseek_v4 casts what it adds to the mask's dtype: in a bool mask hidden blocks become visible."""
    model = small("deepseek_v4")
    theirs = under_eager(model, forward)

    def attend(module, query, key, value, attention_mask, **kwargs):
        additive = torch.where(attention_mask, 0.0, torch.finfo(query.dtype).min)
        return transformers.models.deepseek_v4.modeling_deepseek_v4.eager_attention_forward(
            module, query, key, value, additive, **kwargs
        )

    AttentionInterface.register(deaf, attend)
    mask = lambda *a, **k: masking_utils.sdpa_mask(*a, **{**k, "allow_is_causal_skip": False})  # noqa: E731
    AttentionMaskInterface.register(deaf, mask)
    wrong, right = wrong_and_right(model, deaf, forward)
    assert wrong > 0.1
    assert right <= 1e-5
    assert theirs.isfinite().all()


@pytest.mark.parametrize("name", ["hy_v4", "hy_v4_vl"])
def test_s10_keys_that_an_indexer_picks(name):
    """Three keys of fifteen: attention over all of them is another model."""
    sparse, dense = build(name, index_topk=3), build(name)
    theirs = under_eager(sparse, forward)
    assert relative(under_eager(dense, forward), theirs) > 0.1
    assert relative(under_adapter(sparse, forward), theirs) <= 1e-5


@pytest.mark.parametrize("name", ["gpt_oss", "granite_swa", "mimo_v2_flash"])
@pytest.mark.parametrize("chunk", [4, 5, 12])
def test_s11_pieces_of_a_prompt_in_a_static_cache_without_a_mask(name, chunk):
    """The cache counts on in the tensor that holds the position of the piece, between the mask and the attention."""
    model = small(name)
    run = lambda m: decode(m, IDS, 3, new_cache(m, "static", 20), chunk=chunk)  # noqa: E731
    assert relative(under_adapter(model, run), under_eager(model, forward)) <= 1e-5


@pytest.mark.parametrize("name", ["flint", "gpt_oss", "openai_privacy_filter"])
def test_s14_one_sink_on_a_rank_that_holds_several_heads(name):
    model = small(name)
    for layer in model.model.layers:
        layer.self_attn.sinks = torch.nn.Parameter(layer.self_attn.sinks.detach()[:1])
    with pytest.raises(SinkError, match="1 sinks for 4 query heads"), adapter.adapted(model):
        forward(model)


def test_s18_a_load_that_fails_leaves_the_classes_in_place(tmp_path):
    """transformers leaves a patched class in its module when a load fails; the adapter patches none."""
    save("gpt_oss", tmp_path, num_hidden_layers=2)
    module = transformers.models.gpt_oss.modeling_gpt_oss
    before, patches = dict(vars(module)), dict(get_patch_mapping())
    names = sorted(AttentionInterface._global_mapping), sorted(AttentionMaskInterface._global_mapping)
    (tmp_path / "model.safetensors").write_bytes(b"no checkpoint")
    with pytest.raises(CheckpointError):
        adapter.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert dict(vars(module)) == before
    assert dict(get_patch_mapping()) == patches
    assert (sorted(AttentionInterface._global_mapping), sorted(AttentionMaskInterface._global_mapping)) == names


def test_s18_a_class_that_was_left_patched_is_read_as_it_is(monkeypatch):
    module = transformers.models.gpt_oss.modeling_gpt_oss

    class Patched(module.GptOssAttention):
        pass

    monkeypatch.setattr(module, "GptOssAttention", Patched)
    model = small("gpt_oss")
    assert type(model.model.layers[0].self_attn) is Patched
    assert len(adapter.report(model).sink_layers) == 2
    assert relative(under_adapter(model, forward), under_eager(model, forward)) <= 1e-5


@pytest.mark.parametrize("name", [n for n in ("granite_swa", "granitemoe_swa", "gpt_oss") if n in INSTALLED])
def test_s19_the_weights_that_are_returned_are_those_that_were_applied(name):
    """For two families transformers returns weights without the sink's share, which its output does not follow."""
    model, seen = small(name), []
    with adapter.adapted(model), torch.no_grad():
        attn = model.model.layers[0].self_attn.attn
        attn.register_forward_hook(lambda m, args, out: seen.append((args[2], out[0])))
        weights = model(input_ids=IDS, output_attentions=True).attentions[0]
    value, output = seen[0]
    applied = (weights @ value.repeat_interleave(2, dim=1)).transpose(1, 2)
    torch.testing.assert_close(applied, output, atol=1e-6, rtol=1e-5)
    assert weights.sum(-1).mean() < 0.95
