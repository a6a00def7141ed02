"""Every sink family on 1, 2 and 4 gloo ranks gives what one process gives; what three cannot share is refused."""

from __future__ import annotations

import pytest
import torch
import transformers

import adapter
from adapter.parallel import derive_plan
from tests.families import FAMILIES, INSTALLED, save
from tests.parallel.measure import measure_loaded, measured
from tests.parallel.ranks import run_ranks
from tests.parallel.support import needs_local_params

pytestmark = needs_local_params

REPLICATED = ("deepseek_v4", "inkling2", "inkling2_loop")
"""Their attention has no linear for each of query, key, value and output alone: every rank holds it whole."""
WITHOUT_KEY_HEADS = ("hy_v4", "hy_v4_vl")
"""Latent attention: the config counts as many key heads as query heads."""
SIX = {"num_attention_heads": 6, "num_key_value_heads": 3}
FOR_THREE = {
    "gpt_oss": {**SIX, "num_local_experts": 6},
    "granite_swa": {**SIX, "hidden_size": 96},
    "hy_v4": {"num_attention_heads": 6, "n_routed_experts": 6},
}
"""Sizes that three ranks can share: a plan derived in part, the model's own plan, and latent attention."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Each family's folder, its sinks, and what eager transformers computes in one process."""
    torch.set_num_threads(1)
    folders, expected, sinks = {}, {}, {}
    for name in INSTALLED:
        folders[name] = tmp_path_factory.mktemp(name)
        model = save(name, folders[name])
        model.set_attn_implementation("eager")
        expected[name] = measured(model, name)
        sinks[name] = [p for n, p in model.named_parameters() if n.endswith(".sinks")]
    return folders, expected, sinks


@pytest.fixture(scope="module")
def two(saved):
    return run_ranks(2, measure_loaded, saved[0], timeout=300)


@pytest.fixture(scope="module")
def four(saved):
    return run_ranks(4, measure_loaded, saved[0], timeout=300)


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for key, reference in expected.items():
        if key.endswith("tokens"):
            assert torch.equal(found[key], reference), key
        else:
            difference = (found[key] - reference).abs().max() / reference.abs().max()
            assert difference <= 1e-4, (key, difference)


def assert_same_on_all(ranks, name, expected, sinks):
    """Every rank computes what one process does, and holds its part of the split weights and no more."""
    for rank in ranks:
        assert_equal(rank[name]["outputs"], expected[name])
        shards = rank[name]["shards"]
        assert shards.ranks == len(ranks)
        assert shards.split > 0
        assert shards.share <= 1 / len(ranks) + 0.05
    held = [rank[name]["sinks"] for rank in ranks]
    assert all(len(parts) == len(sinks[name]) for parts in held)
    for whole, *parts in zip(sinks[name], *held, strict=True):
        assert torch.equal(whole, parts[0] if name in REPLICATED else torch.cat(parts))


@pytest.mark.parametrize("name", INSTALLED)
def test_two_ranks_equal_one_process(saved, two, name):
    _, expected, sinks = saved
    assert_same_on_all(two, name, expected, sinks)


@pytest.mark.slow
@pytest.mark.parametrize("name", INSTALLED)
def test_four_ranks_equal_one_process(saved, four, name):
    """More ranks than key-value heads, except where the attention is not split by them."""
    _, expected, sinks = saved
    config = FAMILIES[name].make_config().get_text_config()
    assert name in (*REPLICATED, *WITHOUT_KEY_HEADS) or config.num_key_value_heads == 2
    assert_same_on_all(four, name, expected, sinks)


def test_one_rank_is_the_plain_load(saved):
    folders, expected, _ = saved
    (rank,) = run_ranks(1, measure_loaded, folders)
    for name in folders:
        assert_equal(rank[name]["outputs"], expected[name])
        assert rank[name]["shards"].split == 0


def refused(folders):
    """On a rank: family -> what its load is refused with."""
    found = {}
    for name, folder in folders.items():
        with pytest.raises(adapter.ParallelError) as caught:
            getattr(adapter, FAMILIES[name].auto).from_pretrained(folder, tp_plan="auto")
        found[name] = (caught.value.what, caught.value.where, caught.value.fix)
    return found


def refused_and_measured(misfits, folders):
    return refused(misfits), measure_loaded(folders)


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """On three ranks: the refusals of every family as it is, and what those with fitting sizes give; with the latter
    in one process."""
    torch.set_num_threads(1)
    misfits, folders, expected = {}, {}, {}
    for name in INSTALLED:
        misfits[name] = str(tmp_path_factory.mktemp(name))
        FAMILIES[name].make_config().save_pretrained(misfits[name])  # refused before it misses the weights
    for name in (name for name in FOR_THREE if name in INSTALLED):
        folders[name] = tmp_path_factory.mktemp(name)
        model = save(name, folders[name], **FOR_THREE[name])
        model.set_attn_implementation("eager")
        expected[name] = measured(model, name)
    return run_ranks(3, refused_and_measured, misfits, folders, timeout=200), expected


@pytest.mark.parametrize("name", INSTALLED)
def test_three_ranks_are_refused_with_the_sizes_that_work(three, name):
    whole = name in REPLICATED
    for refusals, _ in three[0]:
        what, where, fix = refusals[name]
        counted = "4 experts do" if whole else "4 query heads (and their sinks) do"
        assert what == f"{counted} not divide by 3 ranks"
        assert where.endswith("layers.0.mlp.experts.gate_up_proj" if whole else "layers.0.self_attn")
        assert fix == "use one of these sizes: 1, 2, 4"


def test_three_ranks_equal_one_process_where_the_sizes_fit(three):
    ranks, expected = three
    assert expected
    for _, found in ranks:
        for name, reference in expected.items():
            assert_equal(found[name]["outputs"], reference)
            assert 0 < found[name]["shards"].share <= 1 / 3 + 0.05


@pytest.mark.parametrize(
    ("name", "overrides", "sizes"),
    [
        ("granite_swa", {**SIX, "hidden_size": 96}, [1, 3, 6]),
        ("granitemoe_swa", {"num_local_experts": 6}, [1, 2]),
        ("flint", {"num_key_value_heads": 1, "num_experts": 8}, [1, 2, 4]),
        ("openai_privacy_filter", {"num_attention_heads": 8}, [1, 2, 4]),
        ("mimo_v2_flash", {**SIX, "n_routed_experts": 9}, [1, 3]),
        ("hy_v4", {"num_attention_heads": 6, "n_routed_experts": 8}, [1, 2]),
        ("deepseek_v4", {"n_routed_experts": 6}, [1, 2, 3, 6]),
        ("inkling2_loop", {"n_routed_experts": 6}, [1, 2, 3, 6]),
    ],
)
def test_the_sizes_that_a_refusal_names_are_all_that_work(name, overrides, sizes):
    family = FAMILIES[name]
    if not family.installed:
        pytest.skip(f"no {name} here")
    with torch.device("meta"):
        model = getattr(transformers, family.auto).from_config(family.make_config(**overrides))
    for ranks in range(1, 10):
        if ranks in sizes:
            derive_plan(model, ranks)
        else:
            with pytest.raises(adapter.ParallelError) as caught:
                derive_plan(model, ranks)
            assert caught.value.fix == f"use one of these sizes: {', '.join(map(str, sizes))}"
