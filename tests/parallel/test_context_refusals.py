"""What cannot be run on a slice of the sequence is refused by name, on every rank, before it is computed."""

from __future__ import annotations

import copy
import re

import pytest
import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh

import adapter
from adapter.parallel import context_parallel, start_ranks
from tests import sinkless
from tests.families import BASE, HEADS, INSTALLED, build, tokens
from tests.parallel.ranks import RankFailed, run_ranks

IDS = tokens(2, 12)


@pytest.fixture
def single_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def adapted(name="gpt_oss", **overrides):
    model = build(name, **overrides)
    adapter.adapt(model)
    return model


def refusal(model, *args, **inputs):
    with context_parallel(model, method="ring"), pytest.raises(adapter.ParallelError, match="SINK-601") as caught:
        model(*args, **inputs)
    assert caught.value.where
    assert caught.value.why
    assert caught.value.fix
    return caught.value


@pytest.mark.parametrize(
    ("inputs", "what", "fix"),
    [
        ({"use_cache": True}, "a cache of keys is asked for", "use_cache=False"),
        ({"past_key_values": transformers.DynamicCache()}, "a cache of keys is asked for", "use_cache=False"),
        ({"cu_seq_lens_k": torch.tensor([0, 12])}, "the call has cu_seq_lens_k", "position_ids that start again"),
        ({"attention_mask": torch.ones(2, 1, 12, 12)}, r"attention_mask is a Tensor of the shape \[2, 1, 12, 12\]",
         r"\[batch, length\]"),
        ({"attention_mask": torch.ones(2, 24)}, r"attention_mask .* for 12 tokens of this rank", "cut like the tokens"),
        ({"attention_mask": {"full_attention": None}}, "attention_mask is a dict", r"\[batch, length\]"),
        ({"position_ids": torch.arange(12).expand(3, 2, 12)}, "position_ids is a Tensor", r"\[batch, length\]"),
        ({"output_router_logits": True}, "router logits", "output_router_logits=False"),
        ({"output_attentions": True}, "attention weights", "output_attentions to False"),
        ({"labels": IDS}, "labels are given without shift_labels and num_items_in_batch", r"context.split\(batch\)"),
        ({"labels": IDS, "shift_labels": IDS}, "labels are given without num_items_in_batch", "context.split"),
    ],
)  # fmt: skip
def test_inputs_that_need_the_whole_sequence(single_rank, inputs, what, fix):
    error = refusal(adapted(), input_ids=IDS, **inputs)
    assert re.search(what, error.what)
    assert re.search(fix, error.fix)


def test_positional_inputs_are_looked_at_too(single_rank):
    assert "attention_mask is a Tensor" in refusal(adapted(), IDS, torch.ones(2, 1, 12, 12)).what
    assert "neither input_ids nor inputs_embeds" in refusal(adapted(), input_ids=None).what


def test_generation_is_refused_before_a_token_is_made(single_rank):
    model = adapted()
    with context_parallel(model), pytest.raises(adapter.ParallelError, match="a cache of keys"):
        model.generate(IDS, max_new_tokens=2)


def test_dropout_on_the_weights(single_rank):
    error = refusal(adapted(attention_dropout=0.1).train(), input_ids=IDS)
    assert error.what == "dropout on the attention weights"
    assert "layers.0.self_attn" in error.where


@pytest.mark.skipif("openai_privacy_filter" not in INSTALLED, reason="no token classifier here")
def test_a_loss_that_is_a_mean_over_the_slice(single_rank):
    error = refusal(adapted("openai_privacy_filter"), input_ids=IDS, labels=IDS % 2)
    assert "none of a causal language model" in error.what


def test_a_layer_that_does_not_say_whether_documents_are_kept_apart(single_rank):
    model = adapted()
    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(
            lambda module, args, kwargs: (args, {k: v for k, v in kwargs.items() if k != "position_ids"}),
            with_kwargs=True,
        )
    packed = torch.cat([torch.arange(5), torch.arange(7)]).expand(2, -1)
    assert "no position_ids that tell" in refusal(model, input_ids=IDS, position_ids=packed).what


def test_a_part_of_the_model_called_by_itself(single_rank):
    model = adapted()
    with context_parallel(model), pytest.raises(adapter.ParallelError, match="outside the model's forward"):
        adapter_sees_two_slices(model)


def adapter_sees_two_slices(model):
    """The inner model alone builds its masks for its own tokens; with one rank these look whole, so pretend two."""
    for attn in model.modules():
        if isinstance(attn, adapter.Attention):
            attn.context.size = 2
    model.model(input_ids=IDS, use_cache=False)


def conv_model():
    config = transformers.Lfm2Config(
        **BASE, **HEADS, intermediate_size=64, layer_types=["full_attention", "conv"] * 2
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config)


def linear_attention_model():
    config = transformers.Qwen3NextConfig(
        **BASE, **HEADS, head_dim=16, intermediate_size=64, moe_intermediate_size=32, num_experts=4,
        num_experts_per_tok=2, shared_expert_intermediate_size=32, linear_num_value_heads=4, linear_num_key_heads=2,
        linear_key_head_dim=16, linear_value_head_dim=16,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config)


def classifier():
    config = transformers.LlamaConfig(**BASE, **HEADS, intermediate_size=64)
    return transformers.AutoModelForSequenceClassification.from_config(config)


def own_positions():
    """A model that counts its positions itself, whatever it is given."""
    model = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**BASE, **HEADS, head_dim=16))
    model.model.rotary_emb.register_forward_pre_hook(lambda module, args, kwargs: (
        args, {**kwargs, "position_ids": torch.arange(args[0].shape[1]).expand(args[0].shape[0], -1)}
    ), with_kwargs=True)  # fmt: skip
    return model


@pytest.mark.parametrize(
    ("make", "what", "where"),
    [
        (conv_model, "outside the attention interface", r"model\.layers\.1\.conv \(Lfm2ShortConv\)"),
        (linear_attention_model, "outside the attention interface", r"model\.layers\.0\.linear_attn"),
        (own_positions, "or on its place", r"^model \(LlamaModel\)"),
        (classifier, r"logits of the shape \[2, 2\]", "LlamaForSequenceClassification"),
        (lambda: sinkless.build("t5"), "an encoder and a decoder", "T5"),
        (lambda: sinkless.build("llama4"), "a mask", r"model\.layers\.0\.self_attn"),
    ],
    ids=["convolution", "linear attention", "own positions", "pooled", "encoder-decoder", "chunks"],
)
def test_models_whose_tokens_meet_elsewhere(single_rank, make, what, where):
    torch.manual_seed(0)
    model = make()
    adapter.adapt(model)
    with pytest.raises(adapter.ParallelError, match=what) as caught:
        context_parallel(model)
    assert re.search(where, caught.value.where)
    assert not model._forward_pre_hooks


@pytest.mark.parametrize("name", ["llama", "qwen3", "bert"])
def test_models_without_sinks_run_too(single_rank, name):
    model = sinkless.build(name)
    adapter.adapt(model)
    with torch.no_grad():
        theirs = model(input_ids=IDS).logits
        with context_parallel(model, method="ring") as context:
            ours = model(**context.split({"input_ids": IDS})).logits
    assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()


def test_models_and_groups_that_do_not_fit(single_rank):
    model = adapted()
    with pytest.raises(adapter.ParallelError, match="is not adapted"):
        context_parallel(build("gpt_oss"))
    with pytest.raises(adapter.ParallelError, match="no method 'zigzag'") as caught:
        context_parallel(model, method="zigzag")
    assert caught.value.fix == "use one of: ulysses, ring"
    with pytest.raises(adapter.ParallelError, match="weights on the meta device"), torch.device("meta"):
        context_parallel(adapted())
    with pytest.raises(adapter.ParallelError, match="device mesh has 2 dimensions"):
        context_parallel(model, init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "cp")))
    with context_parallel(model, init_device_mesh("cpu", (1,))) as context:
        with pytest.raises(adapter.ParallelError, match="already"):
            context_parallel(model)
        with pytest.raises(adapter.ParallelError, match="copied or pickled"):
            copy.deepcopy(model)
    context.close()
    copy.deepcopy(model)


def test_without_a_process_group():
    with pytest.raises(adapter.ParallelError, match=r"torch\.distributed is not initialised"):
        context_parallel(adapted())


def test_a_model_that_is_restored_meanwhile(single_rank):
    model = adapted()
    with context_parallel(model):
        adapter.restore(model)
        with pytest.raises(adapter.ParallelError, match="restored or adapted again"):
            model(input_ids=IDS)
    assert not model._forward_pre_hooks


def test_batches_that_cannot_be_cut(single_rank):
    with context_parallel(adapted()) as context:
        for batch, what in (
            ({"input_ids": IDS, "pixel_values": torch.ones(1, 3, 8, 8)}, "pixel_values has the shape"),
            ({"input_ids": IDS, "attention_mask": torch.ones(2, 12, 12, 12)}, "attention_mask has the shape"),
            ({"attention_mask": torch.ones(2, 12)}, "neither input_ids nor inputs_embeds"),
        ):
            with pytest.raises(adapter.ParallelError, match=what):
                context.split(batch)


def on_three_ranks():
    start_ranks()
    context_parallel(adapted())


def unlike_slices():
    start_ranks()
    with context_parallel(adapted()):
        pass
    model = adapted()
    with context_parallel(model):
        model(input_ids=IDS[:, : 12 - 2 * dist.get_rank()])


def unlike_masks():
    start_ranks()
    model = adapted()
    with context_parallel(model):
        model(input_ids=IDS, attention_mask=torch.ones(2, 12) if dist.get_rank() else None)


def unlike_methods():
    start_ranks()
    context_parallel(adapted(), method="ring" if dist.get_rank() else "ulysses")


def one_refuses():
    start_ranks()
    context_parallel(build("gpt_oss") if dist.get_rank() else adapted())


@pytest.mark.parametrize(
    ("worker", "ranks", "texts"),
    [
        (on_three_ranks, 3, ["4 query heads and 2 key-value heads cannot be dealt out to 3 ranks"] * 3),
        (unlike_slices, 2, [r"unlike parts of the sequence: (12, 10) tokens"] * 2),
        (unlike_masks, 2, ["unlike parts of the sequence: attention_mask on 1 of 2"] * 2),
        (unlike_methods, 2, ["rank 0 asks for 'ulysses' and rank 1 for 'ring'", "rank 1 asks for 'ring'"]),
        (one_refuses, 2, ["rank 1 refuses", "is not adapted"]),
    ],
)
def test_all_ranks_stop_together(worker, ranks, texts):
    with pytest.raises(RankFailed) as failed:
        run_ranks(ranks, worker, timeout=60)
    assert len(failed.value.texts) == ranks
    for rank, text in enumerate(texts):
        assert "SINK-601" in failed.value.texts[rank]
        assert text in failed.value.texts[rank]
