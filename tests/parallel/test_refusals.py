"""What does not fit is refused before a weight is read, with the sizes that would work; and no rank is left waiting."""

from __future__ import annotations

import pytest
import torch
import transformers

import adapter
from adapter.parallel import Agreement, derive_plan, start_ranks
from adapter.parallel.agreement import world_size
from tests.families import FAMILIES, INSTALLED, save
from tests.parallel.ranks import RankFailed, run_ranks
from tests.parallel.support import needs_local_params

pytestmark = needs_local_params
SINKS, QUERIES = "model.layers.*.self_attn.sinks", "model.layers.*.self_attn.q_proj"


def meta(name, **overrides):
    family = FAMILIES[name]
    with torch.device("meta"):
        return getattr(transformers, family.auto).from_config(family.make_config(**overrides))


def test_the_derived_plan_splits_the_sinks_with_the_heads():
    plan = derive_plan(meta("gpt_oss"), 2)
    prefix = "model.layers.*.self_attn"
    assert plan.rules == {
        f"{prefix}.q_proj": "colwise", f"{prefix}.k_proj": "colwise", f"{prefix}.v_proj": "colwise",
        f"{prefix}.o_proj": "rowwise", f"{prefix}.sinks": "colwise", prefix: "local_params",
    }  # fmt: skip
    assert plan.expert_parallel
    assert not plan.replicated


def test_norms_between_projection_and_attention_sum_their_gradients():
    if "flint" not in INSTALLED:
        pytest.skip("no flint here")
    rules = derive_plan(meta("flint"), 2).rules
    assert rules["model.layers.*.self_attn.q_norm"] == "replicated_with_grad_allreduce"


def test_a_model_with_its_own_plan_keeps_it():
    assert derive_plan(meta("granite_swa"), 2).rules == {}


@pytest.mark.parametrize(
    ("overrides", "ranks", "what", "sizes"),
    [
        ({}, 3, "4 query heads", "1, 2, 4"),
        ({"num_attention_heads": 6, "num_key_value_heads": 3}, 2, "3 key-value heads", "1"),
        ({"num_local_experts": 6}, 4, "6 experts", "1, 2"),
    ],
)
def test_what_does_not_divide_is_refused_with_the_sizes_that_work(overrides, ranks, what, sizes):
    with pytest.raises(adapter.ParallelError, match="SINK-601") as caught:
        derive_plan(meta("gpt_oss", **overrides), ranks)
    assert what in str(caught.value)
    assert caught.value.fix.endswith(f"sizes: {sizes}")


@pytest.mark.parametrize("name", ["granite_swa", "hy_v4"])
def test_heads_of_a_model_with_its_own_plan_must_divide(name):
    if name not in INSTALLED:
        pytest.skip(f"no {name} here")
    with pytest.raises(adapter.ParallelError, match="4 query heads"):
        derive_plan(meta(name), 3)


@pytest.mark.parametrize(
    ("user", "what"),
    [({SINKS: "replicate"}, "the heads and not the sinks"), ({QUERIES: "replicate"}, "the sinks and not the heads")],
)
def test_a_plan_that_splits_only_one_of_heads_and_sinks_is_refused(user, what):
    with pytest.raises(adapter.ParallelError, match=what):
        derive_plan(meta("gpt_oss"), 2, user)


def test_several_ranks_without_a_launcher_are_refused(monkeypatch):
    with pytest.raises(adapter.ParallelError, match="torchrun --nproc-per-node 2"):
        adapter.AutoModelForCausalLM.from_pretrained("nowhere", tp_size=2)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    assert world_size() == 2
    with pytest.raises(adapter.ParallelError, match="RANK"):
        start_ranks()


def load(folders):
    start_ranks()
    folder = folders[torch.distributed.get_rank()]
    adapter.AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto")


def test_one_rank_that_fails_to_load_stops_all_with_its_error(tmp_path):
    good, bad = tmp_path / "good", tmp_path / "bad"
    save("gpt_oss", good)
    save("gpt_oss", bad)
    (bad / "model.safetensors").write_bytes(b"not a safetensors file")
    with pytest.raises(RankFailed) as failed:
        run_ranks(2, load, [str(good), str(bad)], timeout=60)
    assert "rank 1 failed to load" in failed.value.texts[0]
    assert "no answer" not in str(failed.value)


def alone_in_the_block():
    start_ranks()
    with Agreement():
        if torch.distributed.get_rank() == 0:
            raise ValueError("only here")


def test_an_agreement_raises_on_every_rank():
    with pytest.raises(RankFailed) as failed:
        run_ranks(2, alone_in_the_block, timeout=60)
    assert failed.value.texts[0].startswith("ValueError: only here")
    assert "rank 0 failed to load: ValueError: only here" in failed.value.texts[1]
