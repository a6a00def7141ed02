"""The scaling benchmark runs small, and what is wrong, missing or not a number gives it exit code 1."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import parallel as benchmark
from tests.mutation.apply import Mutant, mutated
from tests.parallel.ranks import run_ranks
from tests.parallel.support import needs_local_params

pytestmark = needs_local_params

ROOT = Path(__file__).parents[2]
SECONDS = 200
SMALL = ("--device", "cpu", "--size", "tiny", "--repeats", "1")
RANKS = (1, 2)


def run_script(*arguments):
    """The benchmark as a user starts it; on a timeout its launcher and the ranks end with it."""
    environment = {
        **os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "SINKHOLD_TIMEOUT_SECONDS": str(SECONDS // 2)
    }  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, ROOT / "benchmarks" / "parallel.py", *arguments],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        said, complaints = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)
        raise
    return process.returncode, said, complaints


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """What one and two ranks print, and the JSON that they leave."""
    out = tmp_path_factory.mktemp("benchmark") / "out.json"
    code, said, complaints = run_script("--ranks", *map(str, RANKS), *SMALL, "--out", str(out))
    assert code == 0, complaints
    return said, json.loads(out.read_text())


def rows_of(report):
    return [benchmark.Row(**{name: value for name, value in row.items() if name != "ratio"}) for row in report["rows"]]


def test_every_row_is_there_with_its_ratio(finished):
    said, report = finished
    size = benchmark.SIZES["tiny"]
    rows = rows_of(report)
    assert [(r.ranks, r.scheme, r.phase, r.length) for r in rows] == [
        *((1, "one rank", phase, 24) for phase in benchmark.GENERATION),
        *((1, "one rank", phase, 64) for phase in benchmark.TRAINING),
        *((2, method, phase, 64) for method in benchmark.METHODS for phase in benchmark.TRAINING),
        *((2, "tensor parallel", phase, 24) for phase in benchmark.GENERATION),
    ]
    for row, given in zip(rows, report["rows"], strict=True):
        assert given["ratio"] == row.one_rank_milliseconds / row.milliseconds > 0
        assert row.tokens == {"decode": size.new_tokens}.get(row.phase, row.length)
        assert row.error <= 1e-5
        assert benchmark.line(benchmark.cells(row)) in said
    whole = rows[0].rank_bytes
    assert all(r.rank_bytes == whole for r in rows if r.scheme != "tensor parallel")
    assert all(0.5 * whole <= r.rank_bytes < 0.6 * whole for r in rows if r.scheme == "tensor parallel")
    assert report["wrong"] == []
    assert (report["machine"]["device"], report["dtype"]) == ("cpu", "fp32")


def test_the_rows_count_what_the_ranks_say_in_each_layer(finished):
    layers = benchmark.SIZES["tiny"].layers
    said = {
        "one rank": ({}, {}),
        "ulysses": ({"all-gather": 2, "all-to-all": 2 * layers}, {"all-to-all": 2}),
        "ring": ({"all-gather": 2, "send": 2 * layers}, {"send": 2}),
        "tensor parallel": ({"all-reduce": 2 * layers + 1, "all-gather": 1}, {"all-reduce": 2}),
    }
    for row in rows_of(finished[1]):
        assert (row.collectives, row.layer_collectives) == said[row.scheme], row.scheme


SPOILT = {
    "wrong": ({"error": 2e-4}, "error 0.0002, allowed 0.0001"),
    "not a number": ({"error": math.nan}, "error nan"),
    "not finite": ({"error": None}, "error None"),
    "empty": ({"tokens": 0}, "no tokens"),
    "no time": ({"milliseconds": math.nan}, "nan ms"),
}


@pytest.mark.parametrize("change", [*SPOILT, "missing"])
@pytest.mark.parametrize("place", [1, 4, 6, 8])
def test_one_row_that_is_not_right_is_named(finished, change, place):
    rows = rows_of(finished[1])
    check = (finished[1]["dtype"], benchmark.SIZES["tiny"], list(RANKS))
    assert benchmark.faults(rows, *check) == []
    row = rows[place]
    fields, text = SPOILT.get(change, ({}, "no row"))
    rows[place : place + 1] = [replace(row, **fields)] if fields else []
    (found,) = benchmark.faults(rows, *check)
    assert found.startswith(f"{row.scheme}, {row.phase} {row.length}, {row.ranks} ranks: {text}")


def test_a_distance_is_infinite_where_there_is_none():
    right = {"logits": torch.ones(1, 4, 2)}
    assert benchmark.distance({"logits": torch.full((1, 4, 2), 1.5)}, right) == 0.5
    for wrong in (torch.full((1, 4, 2), math.nan), torch.ones(1, 4, 2) * math.inf, torch.ones(1, 0, 2)):
        assert benchmark.distance({"logits": wrong}, right) == math.inf


FAULTS = [
    Mutant("ring: the sink is dropped", "adapter/parallel/ring.py", "_join(output, lse, sinks)",
           "_join(output, lse, None)", ()),
    Mutant("ulysses: not a number", "adapter/parallel/ulysses.py", "_Exchange.apply(output.flatten(1), group)",
           '_Exchange.apply(output.flatten(1) * float("nan"), group)', ()),
]  # fmt: skip


def with_faults(out):
    """On a rank: the exit code with a fault in each way to spread a sequence, and without tensor parallelism."""
    benchmark.Bench._measure_tensor = lambda self: None
    with mutated(FAULTS[0]), mutated(FAULTS[1]):
        return benchmark.main([*SMALL, "--out", out])


def test_a_fault_on_the_ranks_ends_the_benchmark_with_one(tmp_path):
    codes = run_ranks(2, with_faults, str(tmp_path / "out.json"))
    assert codes == [1, 0]  # the first rank judges
    report = json.loads((tmp_path / "out.json").read_text())
    errors = {(row.scheme, row.phase): row.error for row in rows_of(report)}
    for phase in benchmark.TRAINING:
        assert errors["ulysses", phase] is None
        assert errors["ring", phase] > 1e-2
    wrong = "\n".join(report["wrong"])
    assert len(report["wrong"]) == 6
    assert wrong.count("ulysses, ") == wrong.count("ring, ") == 2
    assert "tensor parallel, prefill 24, 2 ranks: no row" in wrong
    assert "tensor parallel, decode 24, 2 ranks: no row" in wrong


def test_ranks_that_do_not_run_end_the_benchmark_with_one(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    assert benchmark.main(["--ranks", "2", *SMALL, "--out", str(tmp_path / "out.json")]) == 1
    assert "2 ranks ended with exit code 1" in capfd.readouterr().err
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["rows"] == []
    assert len(report["wrong"]) == 6
