"""The report says what a rank holds: its bytes, at most its part of them, and the heads whose sinks it has."""

from __future__ import annotations

import json
import re

import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import DistributedConfig

import adapter
from adapter.parallel import Shards, shards_of
from adapter.shards import sink_shard
from tests.families import INSTALLED, build, save
from tests.parallel.ranks import run_ranks
from tests.parallel.support import needs_local_params

SPLIT = ("gpt_oss", "granite_swa")
REPLICATED = ("deepseek_v4",)
LINE = re.compile(
    r"^  sharded: (\d+) ranks: this one holds ([\d,]+) of ([\d,]+) split bytes \(([\d.]+)%\) "
    r"and ([\d,]+) bytes that every rank holds$",
    re.MULTILINE,
)


def reported(folders, sizes):
    """On a rank: family -> the report as text and JSON, and the bytes and sinks that it really holds."""
    found = {}
    for name, folder in folders.items():
        config = DistributedConfig(**sizes)
        model = adapter.AutoModelForCausalLM.from_pretrained(folder, distributed_config=config)
        local = [(p, p.to_local() if isinstance(p, DTensor) else p) for p in model.parameters()]
        held = {"held": sum(own.nbytes for p, own in local if own.shape != p.shape)}
        held["whole"] = sum(own.nbytes for p, own in local if own.shape == p.shape)
        sinks = [m.sinks.detach().clone() for m in model.modules() if isinstance(m, adapter.Attention)]
        report = adapter.report(model)
        found[name] = {"text": str(report), "json": report.to_json(), "held": held, "sinks": sinks}
    return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    torch.set_num_threads(1)
    folders, sinks, sizes = {}, {}, {}
    for name in (*SPLIT, *(n for n in REPLICATED if n in INSTALLED)):
        folders[name] = str(tmp_path_factory.mktemp(name))
        model = save(name, folders[name])
        sinks[name] = [p.detach() for n, p in model.named_parameters() if n.endswith(".sinks")]
        sizes[name] = sum(p.numel() * p.element_size() for p in model.parameters())
    return folders, sinks, sizes


def assert_bytes(found, ranks, size, slack=0.05):
    """The bytes in text and JSON are the same, those of the model, and at most this rank's part of the split ones."""
    shards = json.loads(found["json"])["shards"]
    assert shards["ranks"] == ranks
    assert found["held"].items() <= shards.items()
    assert shards["split"] + shards["whole"] == size
    assert shards["share"] == shards["held"] / shards["split"]
    assert 0 < shards["share"] <= 1 / ranks + slack
    read = LINE.search(found["text"])
    assert read is not None
    numbers = [int(text.replace(",", "")) for text in (read[1], read[2], read[3], read[5])]
    assert numbers == [shards[name] for name in ("ranks", "held", "split", "whole")]
    assert float(read[4]) / 100 == pytest.approx(shards["share"], abs=1e-3)
    assert float(read[4]) / 100 <= 1 / ranks + slack


def assert_sinks(found, rank, sinks):
    """Text and JSON name the heads whose sinks the rank really holds."""
    layers = json.loads(found["json"])["layers"]
    assert len(layers) == len(sinks) == len(found["sinks"])
    for layer, held, whole in zip(layers, found["sinks"], sinks, strict=True):
        shard = layer["sink_shard"]
        assert (shard["rank"], shard["heads"]) == (rank, whole.numel())
        assert layer["sink_shape"] == [shard["stop"] - shard["start"]]
        assert torch.equal(whole[shard["start"] : shard["stop"]], held)
    shard = layers[0]["sink_shard"]
    count = shard["stop"] - shard["start"]
    assert count < shard["heads"]
    heads = f"heads {shard['start']}:{shard['stop']}" if count else "no head"
    place = f"[{count}] of [{shard['heads']}] float32 on cpu, {heads} on rank {rank}"
    lines = [line for line in found["text"].splitlines() if line.strip().startswith("sink ")]
    assert lines
    assert all(place in line for line in lines)
    return lines


@needs_local_params
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_holds_its_part_of_the_bytes_and_of_the_sinks(saved, ranks):
    folders, sinks, sizes = saved
    tensor_parallel = {"tp_plan": "auto", "tp_size": ranks}
    for rank, found in enumerate(run_ranks(ranks, reported, folders, tensor_parallel)):
        for name in SPLIT:
            assert_bytes(found[name], ranks, sizes[name])
            lines = assert_sinks(found[name], rank, sinks[name])
            assert all(line.endswith(f"on rank {rank}") for line in lines)
            layers = json.loads(found[name]["json"])["layers"]
            assert all(layer["sink_shard"]["used"] == 4 // ranks for layer in layers)
        for name in folders.keys() - set(SPLIT):
            assert_bytes(found[name], ranks, sizes[name])
            assert "[4] float32 on cpu, all heads on every rank" in found[name]["text"]
            assert all(map(torch.equal, found[name]["sinks"], sinks[name]))


@needs_local_params
@pytest.mark.parametrize(("ranks", "empty"), [(2, 0), (3, 1)])
def test_fsdp_splits_the_sinks_between_forwards_only(saved, ranks, empty):
    """Four heads go by twos: the last of three ranks has none."""
    folders, sinks, sizes = saved
    found_by_rank = run_ranks(ranks, reported, {name: folders[name] for name in SPLIT}, {"fsdp_size": ranks})
    assert sum("no head on rank" in found[SPLIT[0]]["text"] for found in found_by_rank) == empty
    for rank, found in enumerate(found_by_rank):
        for name in SPLIT:
            assert_bytes(found[name], ranks, sizes[name], slack=0.2 if empty else 0.05)
            lines = assert_sinks(found[name], rank, sinks[name])
            assert all(line.endswith(f"on rank {rank}, 4 in each forward") for line in lines)


@needs_local_params
def test_fsdp_beside_tensor_parallelism_gathers_the_heads_of_the_tensor_parallel_rank(saved):
    folders, sinks, sizes = saved
    name = SPLIT[0]
    found = run_ranks(4, reported, {name: folders[name]}, {"tp_size": 2, "fsdp_size": 2})
    for rank, by_name in enumerate(found):
        assert_bytes(by_name[name], 4, sizes[name])
        lines = assert_sinks(by_name[name], rank, sinks[name])
        assert all(line.endswith(f"on rank {rank}, 2 in each forward") for line in lines)
    starts = [json.loads(by_name[name]["json"])["layers"][0]["sink_shard"]["start"] for by_name in found]
    assert sorted(starts) == [0, 1, 2, 3]


def test_one_process_reports_no_shards():
    model = build("gpt_oss")
    assert shards_of(model) == Shards(1, 0, 0, sum(p.numel() * 4 for p in model.parameters()))
    adapter.adapt(model)
    report = adapter.report(model)
    assert report.shards is None
    assert "rank" not in str(report)
    assert "shard" not in report.to_json()
    shard = sink_shard(model.model.layers[0].self_attn.sinks)
    assert (shard.start, shard.stop, shard.heads, shard.used) == (0, 4, 4, 4)
