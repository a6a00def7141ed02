"""Every sink family on 1, 2 and 4 gloo ranks gives what one process gives."""

from __future__ import annotations

import pytest
import torch

from tests.families import FAMILIES, INSTALLED, save
from tests.parallel.measure import measure_loaded, measured
from tests.parallel.ranks import run_ranks
from tests.parallel.support import needs_local_params

pytestmark = needs_local_params

REPLICATED = ("deepseek_v4", "inkling2", "inkling2_loop")
"""Their attention has no linear for each of query, key, value and output alone: every rank holds it whole."""
WITHOUT_KEY_HEADS = ("hy_v4", "hy_v4_vl")
"""Latent attention: the config counts as many key heads as query heads."""


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
