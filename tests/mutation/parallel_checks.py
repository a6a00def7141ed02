"""Checks of tensor and context parallelism that fail when heads, sinks or tokens end up on the wrong rank.

Those of `on_ranks` are run by all of four ranks at once; those of `CHECKS` need one process.
"""

from __future__ import annotations

import functools
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
import transformers
from torch.distributed.tensor import DTensor
from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES

import adapter
from adapter.backends.call import Visibility
from adapter.errors import ParallelError
from adapter.masks import SPREAD
from adapter.parallel import Agreement, context_parallel, derive_plan, shards_of, ulysses
from adapter.parallel.sequence import mask_obstacle
from adapter.parallel.styles import is_kv_style
from adapter.shards import sink_shard
from adapter.verify import parallel as probe
from adapter.verify.subject import Subject
from tests import sinkless
from tests.families import BASE, FAMILIES, HEADS, build, tokens
from tests.parallel.measure import generated
from tests.parallel.test_context import batches
from tests.parallel.test_context_attention import CASES, errors

RANKS = 4
IDS = tokens(2, 12)
MIXED = ["full_attention", "sliding_attention"]
SMALL = {
    "gpt_oss": {"num_hidden_layers": 2},
    "flint": {"num_hidden_layers": 2, "layer_types": MIXED},
    "mimo_v2_flash": {"num_hidden_layers": 2, "layer_types": MIXED},
    "openai_privacy_filter": {"num_hidden_layers": 2},
}
"""More ranks than key heads; norms behind the projections; value heads of another size; experts of their own."""

EXTREMES = {"ring": ("negative scale",), "ulysses": ("one group of heads", "softcap")}
"""Cases of one method."""


def outputs(model, name):
    """Logits, those of two tokens after a prefill of a static cache in chunks, and the gradients of all parameters."""
    found = {}
    with torch.no_grad():
        found["logits"] = model(input_ids=IDS).logits
        if name == "gpt_oss":
            static = {"cache_implementation": "static", "prefill_chunk_size": 6, "disable_compile": True}
            found |= generated(model, IDS, torch.ones_like(IDS), max_new_tokens=2, **static)
    if FAMILIES[name].generates:
        model(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return found | {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in grads.items()}


@functools.cache
def expected(name):
    model = build(name, **SMALL[name])
    model.set_attn_implementation("eager")
    return outputs(model, name)


def loaded(name, folder):
    for style in [style for style in ALL_PARALLEL_STYLES if is_kv_style(style)]:
        del ALL_PARALLEL_STYLES._global_mapping[style]  # made anew, with the fault in it
    return getattr(adapter, FAMILIES[name].auto).from_pretrained(folder, tp_plan="auto")


def run_tensor_parallel(name, folder):
    """Logits and gradients of four ranks are those of one process."""
    reference, found = expected(name), outputs(loaded(name, folder), name)
    assert found.keys() == reference.keys()
    for key, one in reference.items():
        error = (found[key] - one).abs().max()
        assert error <= 1e-4 * max(1e-3, one.abs().max()), (key, error)


def run_shards(folder):
    """What a rank says of itself is what it holds, and it holds its part alone."""
    model = loaded("gpt_oss", folder)
    own = [(p, p.to_local() if isinstance(p, DTensor) else p) for p in model.parameters()]
    split = [(p, part) for p, part in own if part.numel() < p.numel()]
    shards = shards_of(model)
    assert shards.ranks == RANKS
    assert shards.split == sum(p.nbytes for p, _ in split)
    assert shards.held == sum(part.nbytes for _, part in split) == shards.split // RANKS
    assert shards.whole == sum(p.nbytes for p, part in own if part.numel() == p.numel())
    assert all(isinstance(p, DTensor) for n, p in model.named_parameters() if "experts" in n or n.endswith("sinks"))
    for layer in model.model.layers:
        shard = sink_shard(layer.self_attn.sinks)
        assert (shard.start, shard.stop, shard.heads, shard.used) == (dist.get_rank(), dist.get_rank() + 1, RANKS, 1)


def run_probe(folder):
    """verify's probe passes where the ranks are one model, and fails where sinks or logits of one rank differ."""
    model = loaded("gpt_oss", folder).eval()
    assert probed(model).status == "pass"
    alone = build("gpt_oss", **SMALL["gpt_oss"])  # every rank holds all of it
    adapter.adapt(alone)
    assert probed(alone).status == "pass"
    last = dist.get_rank() == RANKS - 1
    alone.model.layers[1].self_attn.sinks.data[2] += 1e-3 * last
    assert probed(alone).detail == "the ranks hold different sinks in model.layers.1.self_attn"
    alone.model.layers[1].self_attn.sinks.data[2] = 3.0
    alone.model.norm.weight.data[0] += 0.1 * last
    different = probed(alone)
    assert different.status == "fail"
    assert different.number > 1e-4


def probed(model):
    return probe.tensor_parallel(Subject(model, IDS, None))


def run_agreement():
    """A rank that fails does so with its own error, all others with a quotation of it."""
    failing = dist.get_rank() == 2
    with pytest.raises(ValueError if failing else ParallelError, match="only here") as caught, Agreement():
        fail(failing)
    assert failing or "rank 2 failed to load: ValueError: only here" in str(caught.value)


def fail(failing):
    if failing:
        raise ValueError("only here")


def run_agreement_on_context():
    """No rank goes on when one refuses, or when they want different methods."""
    whole, bare = adapted("gpt_oss"), build("gpt_oss", **SMALL["gpt_oss"])
    refuses = dist.get_rank() == 1
    said = [
        refusal(bare if refuses else whole, "ring"),
        refusal(whole, "ulysses" if refuses else "ring"),
    ]
    assert ("is not adapted" if refuses else "rank 1 refuses") in said[0]
    assert "asks for" in said[1]


def refusal(model, method):
    """The text of the error, so that every rank goes on to the next one whatever this says."""
    try:
        context_parallel(model, method=method).close()
    except ParallelError as error:
        return str(error)
    return ""


def run_attention(method):
    """Attention over four ranks and its gradients are the reference's on one."""
    names = ("causal", "window over a rank", "documents", "left padding", *EXTREMES[method])
    found = {name: errors(method, CASES[name]) for name in names}
    for name, by_tensor in found.items():
        assert all(error <= 2e-5 for error in by_tensor.values()), (name, by_tensor)  # NaN fails too


def precise():
    """An adapted model in float64, where the experts' usual forward does not run."""
    model = build("gpt_oss", torch.float64, **SMALL["gpt_oss"])
    model.set_experts_implementation("eager")
    adapter.adapt(model, recording=False)
    return model


@functools.cache
def whole_sequence():
    """Logits of the real tokens of each kind of batch in one process."""
    model = precise()
    with torch.no_grad():
        return {kind: model(**batch).logits[real(batch)] for kind, batch in batches().items()}


def real(batch):
    return batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()


def run_context():
    """A sequence over four ranks has the logits of one process, and a model outside the context sees all of its own."""
    model, other, found = precise(), precise(), {}
    try:
        with context_parallel(model, method="ring") as context, torch.no_grad():
            for kind, batch in batches().items():
                logits = model(**context.split(batch)).logits
                found[kind] = context.gather(logits, length=batch["input_ids"].shape[1])[real(batch)]
            alone = other(**batches()["plain"]).logits[real(batches()["plain"])]
    finally:
        SPREAD.set(None)  # a fault must not outlive its check
    for kind, logits in whole_sequence().items():
        torch.testing.assert_close(found[kind], logits, atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(alone, whole_sequence()["plain"], atol=1e-9, rtol=1e-9)


def on_ranks(folders):
    """The checks of four ranks, for the folders of the families of `SMALL`."""
    families = {f"tensor parallel {n}": functools.partial(run_tensor_parallel, n, f) for n, f in folders.items()}
    return families | {
        "shards": functools.partial(run_shards, folders["gpt_oss"]),
        "probe": functools.partial(run_probe, folders["gpt_oss"]),
        "agreement": run_agreement,
        "agreement on context": run_agreement_on_context,
        "ring": functools.partial(run_attention, "ring"),
        "ulysses": functools.partial(run_attention, "ulysses"),
        "context": run_context,
    }


def meta(name, **overrides):
    family = FAMILIES[name]
    with torch.device("meta"):
        return getattr(transformers, family.auto).from_config(family.make_config(**overrides))


def run_plan():
    """What does not fit is refused with the sizes that work, and what a plan splits is split as a whole."""
    assert "model.layers.*.self_attn.sinks" in derive_plan(meta("gpt_oss"), 4).rules
    six = {"num_attention_heads": 6, "num_key_value_heads": 3}
    gate_up = {"model.layers.*.mlp.experts.gate_up_proj": "packed_colwise"}
    for name, overrides, ranks, user, what, sizes in (
        ("gpt_oss", {}, 3, None, "4 query heads", "1, 2, 4"),
        ("gpt_oss", {**six, "num_local_experts": 12}, 2, None, "3 key-value heads", "1, 3, 6"),
        ("gpt_oss", {"num_local_experts": 6}, 4, None, "6 experts", "1, 2"),
        ("mimo_v2_flash", {"moe_intermediate_size": 6}, 4, gate_up, "6 features", "1, 2"),
    ):
        with pytest.raises(ParallelError, match=what) as caught:
            derive_plan(meta(name, **overrides), ranks, user)
        assert caught.value.fix == f"use one of these sizes: {sizes}"
    for part, what in (("sinks", "the heads and not the sinks"), ("q_proj", "the sinks and not the heads")):
        with pytest.raises(ParallelError, match=what):
            derive_plan(meta("gpt_oss"), 2, {f"model.layers.*.self_attn.{part}": "replicate"})


def run_dealing():
    """Heads that cannot be dealt out to ranks."""
    ulysses.check_heads(4, 2, 4)
    for heads, kv_heads, size in ((6, 3, 2), (4, 2, 3)):
        with pytest.raises(ParallelError, match="cannot be dealt out"):
            ulysses.check_heads(heads, kv_heads, size)


@contextmanager
def single_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def adapted(name, **overrides):
    model = build(name, **{**SMALL.get(name, {}), **overrides})
    adapter.adapt(model, recording=False)
    return model


def run_refused_models():
    """Models whose tokens meet elsewhere, or whose sinks or masks cannot be moved."""
    linear = transformers.Lfm2Config(**BASE, **HEADS, intermediate_size=64, layer_types=["full_attention", "conv"] * 2)
    with single_rank():
        for model, what in (
            (build("inkling2"), "its sink is computed for each token"),
            (build("deepseek_v4"), "its forward changes the mask"),
            (sinkless.build("t5"), "an encoder and a decoder"),
            (transformers.AutoModelForCausalLM.from_config(linear), "outside the attention interface"),
            (sinkless.build("llama4"), "a mask that has no other description"),
        ):
            adapter.adapt(model, recording=False)
            with pytest.raises(ParallelError, match=what):
                context_parallel(model, method="ring")
    assert "chunks" in mask_obstacle(Visibility(1, 4, 4, chunk_size=2))
    assert mask_obstacle(Visibility(1, 4, 4, left=2)) is None


def run_refused_inputs():
    """Inputs whose meaning needs the whole sequence."""
    packed = torch.cat([torch.arange(5), torch.arange(7)]).expand(2, -1)
    model = adapted("gpt_oss")
    with single_rank():
        for inputs, what in (
            ({"use_cache": True}, "a cache of keys"),
            ({"cu_seq_lens_k": torch.tensor([0, 12])}, "the call has cu_seq_lens_k"),
            ({"attention_mask": torch.ones(2, 1, 12, 12)}, "attention_mask is a Tensor"),
            ({"output_router_logits": True}, "router logits"),
            ({"labels": IDS}, "labels are given without"),
        ):
            must_refuse(model, what, **inputs)
        must_refuse(adapted("openai_privacy_filter"), "none of a causal language model", labels=IDS % 2)
        must_refuse(adapted("gpt_oss", attention_dropout=0.1).train(), "dropout on the attention weights")
        for layer in model.model.layers:
            layer.self_attn.register_forward_pre_hook(without_positions, with_kwargs=True)
        must_refuse(model, "no position_ids that tell", position_ids=packed)


def must_refuse(model, what, **inputs):
    with context_parallel(model, method="ring"), pytest.raises(ParallelError, match=what):
        model(input_ids=IDS, **inputs)


def without_positions(module, args, kwargs):
    return args, {name: value for name, value in kwargs.items() if name != "position_ids"}


def run_part_of_a_model():
    """A part of the model that is called by itself, by a rank that holds half of the sequence."""
    model = adapted("gpt_oss")
    with single_rank(), context_parallel(model, method="ring") as context:
        context.size = 2
        with pytest.raises(ParallelError, match="outside the model's forward"):
            model.model(input_ids=IDS, use_cache=False)


CHECKS = {
    "plan": run_plan,
    "dealing": run_dealing,
    "refused models": run_refused_models,
    "refused inputs": run_refused_inputs,
    "part of a model": run_part_of_a_model,
}
