"""A script under the real torchrun: loading, generation and verify on two ranks."""

from __future__ import annotations

import pytest
import torch

from adapter.verify.verification import FAIL, PASS
from tests.adapter.probing import PARALLEL, SAVING
from tests.families import INSTALLED, save
from tests.parallel.launching import WAITS, torchrun
from tests.parallel.support import needs_local_params

pytestmark = needs_local_params

IDS = torch.arange(3, 27).view(2, 12)
NEW_TOKENS = 32
REPLICATED = "deepseek_v4"
"""Each rank holds all of its sinks, so that one rank's can differ from the other's."""

SCRIPT = """
import sys

import torch
import torch.distributed as dist
from transformers import DistributedConfig

from adapter import Attention, AutoModelForCausalLM
from adapter.parallel import shards_of
from adapter.verify import verify

split, replicated, out = sys.argv[1:]
ids = torch.arange(3, 27).view(2, 12)
found = {}
for name, kwargs in {"tp_plan": "auto", "distributed_config": DistributedConfig(tp_size=2)}.items():
    model = AutoModelForCausalLM.from_pretrained(split, **{name: kwargs}).eval()
    with torch.no_grad():
        logits = model(input_ids=ids).logits
    tokens = model.generate(ids, max_new_tokens=32, do_sample=False, eos_token_id=-1)
    sinks = [module.sinks.detach() for module in model.modules() if isinstance(module, Attention)]
    found[name] = {"logits": logits, "tokens": tokens, "sinks": torch.stack(sinks), "shards": shards_of(model)}
found["split"] = verify(model).to_dict()
if replicated:
    model = AutoModelForCausalLM.from_pretrained(replicated, tp_plan="auto").eval()
    found["replicated"] = verify(model).to_dict()
    sinks = model.model.layers[2].self_attn.sinks
    if dist.get_rank() == 1:
        sinks.data[3] += 1e-3
    found["one rank differs"] = verify(model).to_dict()
    sinks.data[3] = 9.0
    found["both changed"] = verify(model).to_dict()
found["timeout"] = dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout.total_seconds()
torch.save(found, f"{out}/rank{dist.get_rank()}.pt")
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each rank found, and the logits, tokens and sinks of one process with eager attention."""
    folder = tmp_path_factory.mktemp("torchrun")
    torch.set_num_threads(1)
    model = save("gpt_oss", folder / "split")
    model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = {"logits": model(input_ids=IDS).logits}
    expected["sinks"] = torch.stack([layer.self_attn.sinks.detach() for layer in model.model.layers])
    expected["tokens"] = model.generate(IDS, max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=-1)
    replicated = folder / "replicated" if REPLICATED in INSTALLED else ""
    if replicated:
        save(REPLICATED, replicated)
    (folder / "script.py").write_text(SCRIPT)
    command = ["--standalone", "--nproc-per-node", 2, folder / "script.py", folder / "split", replicated, folder]
    (ended,) = torchrun(folder, command)
    assert ended.code == 0, ended.said
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(2)], expected


@pytest.mark.parametrize("keyword", ["tp_plan", "distributed_config"])
def test_two_ranks_equal_one_process(ranks, keyword):
    found_by_rank, expected = ranks
    assert torch.equal(torch.cat([found[keyword]["sinks"] for found in found_by_rank], dim=1), expected["sinks"])
    for found in found_by_rank:
        error = (found[keyword]["logits"] - expected["logits"]).abs().max()
        assert error <= 1e-4 * expected["logits"].abs().max()
        assert torch.equal(found[keyword]["tokens"], expected["tokens"])
        shards = found[keyword]["shards"]
        assert (shards.ranks, shards.held) == (2, shards.split // 2)
        assert found["timeout"] == WAITS


def probes(verification):
    return {probe["name"]: probe for probe in verification["probes"]}


def test_verify_passes_on_every_rank(ranks):
    for found in ranks[0]:
        for key in found.keys() & {"split", "replicated", "both changed"}:
            assert found[key]["ok"], found[key]
            outcome = probes(found[key])
            assert outcome[PARALLEL]["status"] == PASS
            assert outcome[PARALLEL]["detail"] == "2 ranks: logits and the sinks of 4 layers"
            assert 0 <= outcome[PARALLEL]["number"] <= outcome[PARALLEL]["limit"]
            assert [name for name, probe in outcome.items() if probe["status"] != PASS] == [SAVING]


@pytest.mark.skipif(REPLICATED not in INSTALLED, reason="no family with whole sinks on every rank here")
def test_verify_fails_on_every_rank_when_the_sinks_of_one_differ(ranks):
    for found in ranks[0]:
        assert not found["one rank differs"]["ok"]
        outcome = probes(found["one rank differs"])
        assert outcome[PARALLEL]["status"] == FAIL
        assert outcome[PARALLEL]["detail"] == "the ranks hold different sinks in model.layers.2.self_attn"
        assert [name for name, probe in outcome.items() if probe["status"] == FAIL] == [PARALLEL]
