"""The ranks speak as seldom as the scheme allows: an all-reduce for each block of a layer, and none to gather.

A block ends where a sum over ranks is needed: the attention's output projection, the down projection of a dense MLP or
of a shared expert, and the routed experts. In a backward each block sums the gradient of its input once.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from adapter.parallel.sharing import SharedInput
from tests.families import INSTALLED, save
from tests.parallel.collectives import OUTSIDE, counted
from tests.parallel.ranks import run_ranks
from tests.parallel.support import needs_local_params

pytestmark = needs_local_params

BLOCK = Counter({"all-reduce": 1})
EXCHANGE = Counter({"all-to-all": 3, "all-gather": 1})
"""Tokens go to their experts and back: counts, tokens, results, and the ranks' shares of the tokens put together."""
EXCHANGE_BACK = Counter({"all-to-all": 2, "all-gather": 2})

LAYERS = {
    "gpt_oss": ["experts"] * 4,
    "granite_swa": ["dense"] * 4,
    "granitemoe_swa": ["experts"] * 4,
    "flint": ["dense", *["experts and shared"] * 3],
    "openai_privacy_filter": ["experts"] * 4,
    "mimo_v2_flash": ["dense", *["experts"] * 3],
    "hy_v4": ["dense", *["experts and shared"] * 3],
}
"""The second block of each layer; the first is an attention whose heads are split."""
FAMILIES_COUNTED = [name for name in LAYERS if name in INSTALLED]
OWN_EXPERTS_FORWARD = ("openai_privacy_filter",)
"""Their experts' forward knows no ids of other ranks, so tokens are exchanged in inference too."""
MORE_IN_BACKWARD = {"flint": 2, "hy_v4": 3}
"""Attention: weights of two norms on this rank's heads; three latent inputs and the shared rotary key, not one."""
TWO_KV_HEADS = ["gpt_oss", "granite_swa"]


def second_block(block, exchanged, exchange):
    routed = (exchange if exchanged else BLOCK) if block.startswith("experts") else Counter()
    return routed + (BLOCK if block in ("dense", "experts and shared") else Counter())


def expected(name, phase, more=0):
    """What each layer of a family says in a phase; `more` all-reduces of its attention's backward."""
    exchanged = phase != "inference" or name in OWN_EXPERTS_FORWARD
    if phase == "backward":
        extra = Counter({"all-reduce": MORE_IN_BACKWARD.get(name, 0) + more})
        return [BLOCK + extra + second_block(block, exchanged, EXCHANGE_BACK) for block in LAYERS[name]]
    return [BLOCK + second_block(block, exchanged, EXCHANGE) for block in LAYERS[name]]


def layers_of(counts):
    return [Counter(counts[place]) for place in sorted(counts.keys() - {OUTSIDE})]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    found = {name: str(tmp_path_factory.mktemp(name)) for name in FAMILIES_COUNTED}
    for name, folder in found.items():
        save(name, folder)
    return found


@pytest.fixture(scope="module")
def two(folders):
    return run_ranks(2, counted, folders, timeout=200)


@pytest.mark.parametrize("name", FAMILIES_COUNTED)
def test_each_block_of_a_layer_costs_one_collective(two, name):
    assert two[0][name] == two[1][name]
    for phase, counts in two[0][name].items():
        assert layers_of(counts) == expected(name, phase), phase


def test_a_dense_layer_costs_two_all_reduces_in_each_direction(two):
    for phase, counts in two[0]["granite_swa"].items():
        assert layers_of(counts) == [Counter({"all-reduce": 2})] * 4, phase


def test_in_inference_nothing_is_gathered_but_the_logits(two):
    for name in FAMILIES_COUNTED:
        kinds = [kind for place, kinds in two[0][name]["inference"].items() for kind in kinds if place != OUTSIDE]
        assert name in OWN_EXPERTS_FORWARD or set(kinds) == {"all-reduce"}
    assert two[0]["granite_swa"]["inference"][OUTSIDE] == {"all-reduce": 1, "all-gather": 1}


@pytest.mark.slow
def test_ranks_that_share_a_key_head_also_sum_its_gradient(folders):
    chosen = {name: folders[name] for name in TWO_KV_HEADS}
    for rank in run_ranks(4, counted, chosen, timeout=200):
        for name in TWO_KV_HEADS:
            for phase, counts in rank[name].items():
                assert layers_of(counts) == expected(name, phase, more=2), phase


def test_an_input_is_shared_only_where_a_backward_over_ranks_follows():
    shared, linear = SharedInput(), torch.nn.Linear(4, 4)
    whole = torch.ones(1, 4, requires_grad=True)
    assert shared.share(linear, (whole,)) == (whole,)
    assert shared.share(linear, ()) == ()
    with torch.no_grad():
        assert shared.share(linear, (whole, 1)) == (whole, 1)
