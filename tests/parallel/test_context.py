"""A sequence spread over ranks gives the logits, the loss and the gradients of one process, or is refused."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import adapter
from adapter.parallel import context_parallel, start_ranks
from tests.families import FAMILIES, INSTALLED, build, save, tokens
from tests.mutation.apply import Mutant, mutated
from tests.parallel.ranks import run_ranks
from tests.parallel.support import needs_local_params

REFUSED = {
    "hy_v4": "its forward changes the mask",
    "hy_v4_vl": "its forward changes the mask",
    "deepseek_v4": "its forward changes the mask",
    "inkling2": "its sink is computed for each token",
    "inkling2_loop": "its sink is computed for each token",
}
RUN = [name for name in INSTALLED if name not in REFUSED]
METHODS = ("ulysses", "ring")
LENGTH = 24
DTYPE = torch.float64  # in float32 rounding alone moves some gradients of these tiny models by 1e-4 of their scale
TOLERANCE = 1e-5


def mask(left):
    """Two rows, the first with 7 tokens of padding on one side."""
    real = torch.ones(2, LENGTH, dtype=torch.long)
    real[0, slice(0, 7) if left else slice(-7, None)] = 0
    return real


def positions():
    """Documents that end within a rank, on the edge of one, and a row that is one document."""
    packed = [torch.arange(n) for n in (5, 7, 12)]
    return torch.stack([torch.cat(packed), torch.arange(LENGTH)])


def batches():
    ids = tokens(2, LENGTH)
    padded = {"attention_mask": mask(True), "position_ids": (mask(True).cumsum(-1) - 1).clamp(min=0)}
    return {
        "plain": {"input_ids": ids},
        "packed": {"input_ids": ids, "position_ids": positions()},
        "left padding": {"input_ids": ids, **padded},
        "right padding": {"input_ids": ids, "attention_mask": mask(False)},
        "uneven": {"input_ids": ids[:, :-5]},
    }


def labels():
    """Some are left out, one of them behind the edge of a rank."""
    chosen = tokens(2, LENGTH, seed=9)
    chosen[:, 12], chosen[0, :4] = -100, -100
    return chosen


def loss_of(model, name, batch, whole_count):
    """The model's own loss; that of a token classifier by hand, as the sum over these tokens over all there are."""
    if FAMILIES[name].generates:
        return model(**batch).loss
    given = batch["labels"] % model.config.num_labels
    logits = model(**{k: v for k, v in batch.items() if k != "labels"}).logits
    return F.cross_entropy(logits.flatten(0, 1), given.flatten(), reduction="sum") / whole_count


def named_gradients(model):
    return {n: p.grad.detach().clone() for n, p in model.named_parameters() if p.grad is not None}


def precise(name):
    model = build(name, DTYPE)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the grouped one has no float64
    adapter.adapt(model)
    return model


def one_process(name):
    model = precise(name)
    found = {}
    with torch.no_grad():
        for kind, batch in batches().items():
            real = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
            found[kind] = model(**batch).logits[real]
    for kind in ("plain", "packed"):
        model.zero_grad()
        batch = {**batches()[kind], "labels": labels()}
        loss = loss_of(model, name, batch, labels().numel())
        loss.backward()
        found[f"loss, {kind}"], found[f"gradients, {kind}"] = loss.detach(), named_gradients(model)
    return found


def on_ranks(names, method):
    start_ranks()
    return {name: one_rank(name, method) for name in names}


def one_rank(name, method):
    model = precise(name)
    found = {}
    with context_parallel(model, method=method) as context:
        with torch.no_grad():
            for kind, batch in batches().items():
                ids, part = batch["input_ids"], context.split(batch)
                if kind == "plain":
                    del part["position_ids"]  # slices of one length in the order of the ranks say them too
                logits = context.gather(model(**part).logits, length=ids.shape[1])
                found[kind] = logits[batch.get("attention_mask", torch.ones_like(ids)).bool()]
        for kind in ("plain", "packed"):
            model.zero_grad()
            part = context.split({**batches()[kind], "labels": labels()})
            loss = loss_of(model, name, part, labels().numel())
            loss.backward()
            context.reduce_gradients()
            found[f"loss, {kind}"], found[f"gradients, {kind}"] = context.total(loss), named_gradients(model)
    assert not model._forward_pre_hooks
    assert not model._forward_hooks
    found["alone again"] = model(input_ids=tokens(2, LENGTH)).logits.detach()
    return found


@pytest.fixture(scope="module")
def expected():
    torch.set_num_threads(1)
    return {name: one_process(name) for name in RUN}


def assert_equal(found, reference, what, tolerance=TOLERANCE):
    if isinstance(reference, dict):
        assert found.keys() == reference.keys(), what
        for name, one in reference.items():
            assert_equal(found[name], one, (what, name), tolerance)
        assert any(name.endswith("sinks") for name in reference)
        return
    error = (found - reference).abs().max()
    assert error <= tolerance * max(1e-3, reference.abs().max()), (what, error, reference.abs().max())


def assert_all_equal(found, reference, name):
    for what, one in reference.items():
        assert_equal(found[what], one, (name, what))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_logits_loss_and_gradients_equal_one_process(expected, method, ranks):
    for rank in run_ranks(ranks, on_ranks, RUN, method, timeout=240):
        for name, reference in expected.items():
            assert rank[name].pop("alone again").shape[1] == LENGTH
            assert rank[name].keys() == reference.keys()
            assert_all_equal(rank[name], reference, name)


MUTANTS = [
    ("gpt_oss", Mutant("queries of every rank stand first", "adapter/parallel/sequence.py",
                       "q_offset=start", "q_offset=0", ())),
    ("gpt_oss", Mutant("padding is forgotten", "adapter/parallel/sequence.py",
                       "padding=self.padding,", "padding=None,", ())),
    ("gpt_oss", Mutant("documents are forgotten", "adapter/parallel/sequence.py",
                       "documents = self.documents", "documents = None", ())),
    ("gpt_oss", Mutant("each rank counts positions from zero", "adapter/parallel/sequence.py",
                       "torch.arange(rank * length, (rank + 1) * length", "torch.arange(length", ())),
    ("gpt_oss", Mutant("a window of the slice", "adapter/parallel/sequence.py",
                       "left=visibility.left", "left=None", ())),
    ("gpt_oss", Mutant("labels are not shifted", "adapter/parallel/batch.py", "(0, 1), value=IGNORED)[:, 1:]",
                       "(0, 1), value=IGNORED)[:, :-1]", ())),
    ("gpt_oss", Mutant("labels that are left out count", "adapter/parallel/batch.py",
                       '(whole["shift_labels"] != IGNORED).sum()', '(whole["shift_labels"] != 0).sum()', ())),
    ("gpt_oss", Mutant("gradients are not summed", "adapter/parallel/gradients.py",
                       "dist.all_reduce(_local(parameter.grad), group=group)", "pass", ())),
    ("openai_privacy_filter", Mutant("the tokens that fill up are seen", "adapter/parallel/batch.py",
                                     "torch.arange(count, device", "torch.arange(19, 19 + count, device", ())),
]  # fmt: skip


def with_faults(faults, method):
    start_ranks()
    found = []
    for name, mutant in faults:
        with mutated(mutant):
            found.append(one_rank(name, method))
    return found


def test_a_slice_that_is_taken_for_the_whole_is_seen(expected):
    for rank in run_ranks(2, with_faults, MUTANTS, "ring"):
        for (name, mutant), found in zip(MUTANTS, rank, strict=True):
            with pytest.raises(AssertionError, match="tensor"):
                assert_all_equal(found, expected[name], mutant.name)


def trained_otherwise(how):
    """On a rank: gradients of gpt_oss with recomputation in the backward, or sharded by FSDP over the same ranks."""
    start_ranks()
    model = precise("gpt_oss")
    scale = 1
    if how == "recomputed":
        model.train()
        model.gradient_checkpointing_enable()
    else:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for part in (*model.model.layers, model):
            fully_shard(part, mesh=mesh)
        scale = dist.get_world_size()  # it averages
    with context_parallel(model, method="ring") as context:
        part = context.split({**batches()["plain"], "labels": labels()})
        (scale * model(**part).loss).backward()
        if how == "recomputed":
            context.reduce_gradients()
        else:
            with pytest.raises(adapter.ParallelError, match="spread over the ranks of the context"):
                context.reduce_gradients()
    grads = named_gradients(model)
    return {n: g.full_tensor() if hasattr(g, "full_tensor") else g for n, g in grads.items()}


@pytest.mark.parametrize("how", ["recomputed", "sharded"])
def test_gradients_with_recomputation_and_with_fsdp(expected, how):
    for rank in run_ranks(2, trained_otherwise, how):
        assert_equal(rank, expected["gpt_oss"]["gradients, plain"], how)


def with_tensor_parallelism(folder, method):
    """On a rank of 2 x 2: FSDP and the sequence share one dimension, the heads are split along the other."""
    start_ranks()
    config = transformers.DistributedConfig(tp_size=2, fsdp_size=2)
    model = adapter.AutoModelForCausalLM.from_pretrained(folder, distributed_config=config)
    mesh = next(p.device_mesh for p in model.parameters() if p.device_mesh.ndim == 2)
    with context_parallel(model, mesh["fsdp"], method=method) as context:
        part = context.split({**batches()["packed"], "labels": labels()})
        output = model(**part)
        (context.size * output.loss).backward()
    grads = named_gradients(model)
    gradients = {n: g.full_tensor() if hasattr(g, "full_tensor") else g for n, g in grads.items()}
    return {"packed": context.gather(output.logits), "gradients, packed": gradients}


@needs_local_params
@pytest.mark.parametrize("method", METHODS)
def test_together_with_tensor_parallelism_and_fsdp(tmp_path, method):
    model = save("gpt_oss", tmp_path)
    adapter.adapt(model)
    output = model(**batches()["packed"], labels=labels())
    output.loss.backward()
    for rank in run_ranks(4, with_tensor_parallelism, str(tmp_path), method):
        assert_equal(rank["packed"], output.logits, "logits", tolerance=1e-4)
        assert_equal(rank["gradients, packed"], named_gradients(model), "gradients", tolerance=1e-3)


def counted(method):
    """On a rank: how often the ranks exchange something in one forward of four layers, after the first."""
    start_ranks()
    model = build("gpt_oss", layer_types=["sliding_attention", "full_attention"] * 2)
    adapter.adapt(model)
    counts = Counter()
    with context_parallel(model, method=method) as context, torch.no_grad():
        part = context.split({"input_ids": tokens(1, 64)})
        model(**part)
        for name in ("all_to_all_single", "batch_isend_irecv", "all_gather"):
            original = getattr(dist, name)

            def count(*args, _name=name, _original=original, **kwargs):
                counts[_name] += 1
                return _original(*args, **kwargs)

            setattr(dist, name, count)
        model(**part)
    return counts


def test_the_ranks_exchange_no_more_than_they_must():
    # two gathers a forward: whether the slices fit, and their position ids; a window of 8 reaches one rank back
    assert all(c == {"all_to_all_single": 8, "all_gather": 2} for c in run_ranks(4, counted, "ulysses"))
    assert all(c == {"batch_isend_irecv": 2 * 1 + 2 * 3, "all_gather": 2} for c in run_ranks(4, counted, "ring"))


@pytest.fixture
def single_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def adapted(name, **overrides):
    model = build(name, **overrides)
    adapter.adapt(model)
    return model


@pytest.mark.parametrize("name", INSTALLED)
@pytest.mark.parametrize("method", METHODS)
def test_every_family_runs_or_is_refused_with_its_reason(single_rank, name, method):
    model = adapted(name)
    if name in REFUSED:
        with pytest.raises(adapter.ParallelError, match=REFUSED[name]) as caught:
            context_parallel(model, method=method)
        assert "self_attn" in caught.value.where
    else:
        with context_parallel(model, method=method) as context, torch.no_grad():
            batch = {"input_ids": tokens(2, 13)}
            ours = model(**context.split(batch)).logits
        theirs = model(**batch).logits
        assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()
    assert all(attn.context is None for attn in model.modules() if isinstance(attn, adapter.Attention))


@pytest.mark.parametrize("name", [n for n in ("inkling2", "deepseek_v4") if n in INSTALLED])
def test_tokens_that_meet_outside_attention_are_found_by_trial(single_rank, name, monkeypatch):
    monkeypatch.setattr("adapter.parallel.context.check_layers", lambda *_: None)
    with pytest.raises(adapter.ParallelError, match="SINK-601") as caught:
        context_parallel(adapted(name))
    assert "layers.0" in caught.value.where or "layers.1" in caught.value.where
