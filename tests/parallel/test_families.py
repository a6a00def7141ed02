"""Every sink family on 1, 2 and 4 gloo ranks gives what one process gives."""

from __future__ import annotations

import pytest
import torch

from tests.families import FAMILIES, INSTALLED, save
from tests.parallel.measure import measure_loaded, measured
from tests.parallel.ranks import run_ranks
from tests.parallel.support import needs_local_params

pytestmark = needs_local_params

MORE_RANKS_THAN_KV_HEADS = [n for n in ("gpt_oss", "granite_swa", "flint", "mimo_v2_flash") if n in INSTALLED]
REPLICATED = ("deepseek_v4", "inkling2", "inkling2_loop")


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
    folders = {name: saved[0][name] for name in MORE_RANKS_THAN_KV_HEADS}
    return run_ranks(4, measure_loaded, folders, timeout=300)


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for key, reference in expected.items():
        if key.endswith("tokens"):
            assert torch.equal(found[key], reference), key
        else:
            difference = (found[key] - reference).abs().max() / reference.abs().max()
            assert difference <= 1e-4, (key, difference)


@pytest.mark.parametrize("name", INSTALLED)
def test_two_ranks_equal_one_process(saved, two, name):
    _, expected, sinks = saved
    for rank in two:
        assert_equal(rank[name]["outputs"], expected[name])
        assert rank[name]["shards"].share <= 1 / 2 + 0.05
        assert rank[name]["shards"].split > 0
    for place, whole in enumerate(sinks[name]):
        parts = [rank[name]["sinks"][place] for rank in two]
        assert torch.equal(whole, parts[0] if name in REPLICATED else torch.cat(parts))


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE_RANKS_THAN_KV_HEADS)
def test_four_ranks_share_two_key_value_heads(saved, four, name):
    _, expected, sinks = saved
    assert FAMILIES[name].make_config().num_key_value_heads == 2
    for rank in four:
        assert_equal(rank[name]["outputs"], expected[name])
        assert rank[name]["shards"].share <= 1 / 4 + 0.05
    for place, whole in enumerate(sinks[name]):
        assert torch.equal(whole, torch.cat([rank[name]["sinks"][place] for rank in four]))


def test_one_rank_is_the_plain_load(saved):
    folders, expected, _ = saved
    (rank,) = run_ranks(1, measure_loaded, {"gpt_oss": folders["gpt_oss"]})
    assert_equal(rank["gpt_oss"]["outputs"], expected["gpt_oss"])
    assert rank["gpt_oss"]["shards"].split == 0
