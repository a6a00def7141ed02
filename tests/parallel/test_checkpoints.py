"""Distributed checkpoints: what some ranks have trained and written, other numbers of ranks read and train on."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor
from transformers import DistributedConfig

import adapter
from tests.families import INSTALLED, save, tokens
from tests.parallel.ranks import run_ranks
from tests.parallel.support import needs_local_params

pytestmark = needs_local_params

FAMILIES = [name for name in ("gpt_oss", "granite_swa") if name in INSTALLED]
"""A plan derived by the adapter, and a model that ties its weights."""


def load(folder, sizes):
    config = {"distributed_config": DistributedConfig(**sizes)} if sizes else {}
    return adapter.AutoModelForCausalLM.from_pretrained(str(folder), **config)


def optimizer_of(model):
    # Adam would move a weight by a gradient that is only rounding as far as by any other
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def step(model, optimizer):
    """One step of training, and the logits after it."""
    ids = tokens(2, 12)
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return logits(model)


@torch.no_grad()
def logits(model):
    found = model(input_ids=tokens(2, 12), use_cache=False).logits
    return found.full_tensor() if isinstance(found, DTensor) else found


def write(folders, out, sizes):
    found = {}
    for name, folder in folders.items():
        model = load(folder, sizes)
        optimizer = optimizer_of(model)
        found[name] = step(model, optimizer)
        weights, moments = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=f"{out}/{name}")
    return found


def read(folders, out, sizes):
    """The logits as stored, and after one more step."""
    found = {}
    for name, folder in folders.items():
        model = load(folder, sizes)
        optimizer = optimizer_of(model)
        weights, moments = get_state_dict(model, optimizer)
        stored = {"model": weights, "optimizer": moments}
        dcp.load(stored, checkpoint_id=f"{out}/{name}")
        set_state_dict(model, optimizer, model_state_dict=stored["model"], optim_state_dict=stored["optimizer"])
        found[name] = logits(model), step(model, optimizer)
    return found


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Folders, and what eager attention in one process gives after one step and after two."""
    torch.set_num_threads(1)
    folders, expected = {}, {}
    for name in FAMILIES:
        folders[name] = tmp_path_factory.mktemp(name)
        model = save(name, folders[name])
        model.set_attn_implementation("eager")
        optimizer = optimizer_of(model)
        before = logits(model)
        expected[name] = step(model, optimizer), step(model, optimizer)
        assert (expected[name][0] - before).abs().max() > 0.05
    return folders, expected


def assert_close(found, expected, limit=1e-4):
    assert (found - expected).abs().max() <= limit * expected.abs().max()


WRITERS = {"tp2": (2, {"tp_plan": "auto", "tp_size": 2}), "fsdp2": (2, {"fsdp_size": 2}), "one": (1, {})}
READERS = {
    **WRITERS, "tp4": (4, {"tp_plan": "auto", "tp_size": 4}), "fsdp4": (4, {"fsdp_size": 4}),
    "tp2 x fsdp2": (4, {"tp_size": 2, "fsdp_size": 2}),
}  # fmt: skip
PAIRS = [
    ("tp2", "tp4"), ("tp2", "one"), ("tp2", "fsdp2"), ("fsdp2", "one"), ("fsdp2", "fsdp4"), ("fsdp2", "tp2"),
    ("one", "tp2 x fsdp2"),
]  # fmt: skip


@pytest.fixture(scope="module")
def written(trained, tmp_path_factory):
    """Writer -> the folder of what it wrote, written once."""
    found = {}

    def wrote(name):
        if name not in found:
            ranks, sizes = WRITERS[name]
            out = tmp_path_factory.mktemp(name)
            found[name] = out, run_ranks(ranks, write, trained[0], str(out), sizes)
        return found[name]

    return wrote


@pytest.mark.slow
@pytest.mark.parametrize(("writer", "reader"), PAIRS)
def test_training_goes_on_with_other_ranks(trained, written, writer, reader):
    folders, expected = trained
    out, after_one = written(writer)
    ranks, sizes = READERS[reader]
    after_two = run_ranks(ranks, read, folders, str(out), sizes)
    for name in folders:
        for rank in after_one:
            assert_close(rank[name], expected[name][0])
        for rank in after_two:
            stored, stepped = rank[name]
            assert_close(stored, expected[name][0])
            assert_close(stepped, expected[name][1], 1e-3)  # two steps enlarge what rounding made of a gradient
