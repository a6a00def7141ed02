"""Gradients, FSDP2 and saving over ranks equal one process."""

from __future__ import annotations

import filecmp
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import DistributedConfig

import adapter
from tests.families import FAMILIES, INSTALLED, save, tokens
from tests.parallel.ranks import run_ranks
from tests.parallel.support import needs_local_params

pytestmark = needs_local_params
FAMILIES_TRAINED = [n for n in ("gpt_oss", "granite_swa", "flint", "mimo_v2_flash") if n in INSTALLED]


def gradients(model):
    ids = tokens(2, 12)
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    found = {}
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        if grad is not None:
            found[name] = (grad.full_tensor() if isinstance(grad, DTensor) else grad).detach().clone()
    return found


def train_and_save(folders, out, sizes):
    found = {}
    for name, folder in folders.items():
        config = DistributedConfig(**sizes)
        model = getattr(adapter, FAMILIES[name].auto).from_pretrained(folder, distributed_config=config)
        found[name] = gradients(model)
        names = list(model.state_dict())
        model.save_pretrained(f"{out}/{name}")
        assert list(model.state_dict()) == names
    return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    torch.set_num_threads(1)
    folders, expected = {}, {}
    for name in FAMILIES_TRAINED:
        folders[name] = str(tmp_path_factory.mktemp(name))
        model = save(name, folders[name])
        model.set_attn_implementation("eager")
        expected[name] = gradients(model)
    return folders, expected


def assert_same_gradients(found, expected):
    assert found.keys() == expected.keys()
    for name, reference in expected.items():
        error = (found[name] - reference).abs().max()
        assert error <= 1e-4 * max(1e-3, reference.abs().max()), (name, error, reference.abs().max())
    sinks = [n for n in expected if n.endswith(".sinks")]
    assert sinks
    assert all(expected[n].abs().max() > 0 for n in sinks)


def assert_same_files(folder, out):
    files = sorted(path.name for path in Path(folder).iterdir())
    assert sorted(path.name for path in Path(out).iterdir()) == files
    assert filecmp.cmpfiles(folder, out, files, shallow=False) == (files, [], [])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "sizes", "names"),
    [
        (2, {"tp_plan": "auto", "tp_size": 2}, FAMILIES_TRAINED),
        (4, {"tp_plan": "auto", "tp_size": 4}, FAMILIES_TRAINED[:1]),
        (2, {"fsdp_size": 2}, FAMILIES_TRAINED[:2]),
        (4, {"tp_size": 2, "fsdp_size": 2}, FAMILIES_TRAINED[:2]),
    ],
    ids=["tp2", "tp4, two kv heads", "fsdp2", "tp2 x fsdp2"],
)
def test_gradients_and_saved_files_equal_one_process(saved, tmp_path, ranks, sizes, names):
    folders, expected = saved
    chosen = {name: folders[name] for name in names}
    for rank in run_ranks(ranks, train_and_save, chosen, str(tmp_path), sizes, timeout=200):
        for name in names:
            assert_same_gradients(rank[name], expected[name])
    for name in names:
        assert_same_files(folders[name], tmp_path / name)
