"""The scaling benchmark runs small, and what is wrong, missing or not a number ends it with 1; the pages follow it."""

from __future__ import annotations

import importlib.util
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
from tests.test_project import assert_current

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


@pytest.fixture(scope="module")
def tables():
    spec = importlib.util.spec_from_file_location("tables", ROOT / "docs" / "tables.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["scaling_prefill", "scaling_decode", "parallel_cpu"])
def test_the_pages_say_what_was_measured_and_computed(tables, name):
    assert_current(name, tables.TABLES[name](), tables.PAGES)


def test_collectives_on_paper(tables):
    """By hand, with 1 MB, where the bytes weigh more than the steps: 14 steps in one host, 28 and 2 over two."""
    assert tables.all_reduce(1, 1e6) == 0
    large = 8.4e-6 + 14 * 3.4e-6 + 14 / 8 * 100e6 / 450e9
    assert tables.all_reduce(8, 100e6) == pytest.approx(large)
    small = 6.6e-6 + 14 * 0.6e-6 + 2 * 14 / 8 * 1e4 / 450e9
    assert tables.all_reduce(8, 1e4) == pytest.approx(small)
    two_hosts = 8.4e-6 + 28 * 3.4e-6 + 2 * 14e-6 + 30 / 16 * 100e6 / 400e9
    assert tables.all_reduce(16, 100e6) == pytest.approx(two_hosts)
    assert tables.all_to_all(1, 1e6) == 0
    assert tables.all_to_all(8, 8e6) == pytest.approx(8.4e-6 + 3.4e-6 + 7e6 / 450e9)
    assert tables.all_to_all(16, 16e6) == pytest.approx(8.4e-6 + 14e-6 + 7e6 / 450e9 + 8e6 / 50e9)
    assert tables.hand_on(8, 1e6) == pytest.approx(8.4e-6 + 3.4e-6 + 1e6 / 450e9)
    assert tables.hand_on(16, 1e6) == pytest.approx(8.4e-6 + 14e-6 + 1e6 / 50e9)


def test_attention_blocks_on_paper(tables):
    """By hand, a kernel of one second, beside which two ranks' words weigh little."""
    weights = 2880 * 64 * (2 * 64 + 2 * 8)
    alone = 2 * 32768 * weights / 790e12
    assert tables.projections(32768) == pytest.approx(alone)
    assert tables.projections(32768, 8) == pytest.approx(alone / 8)
    assert tables.projections(32768, 64) == pytest.approx(alone / weights * 2880 * 64 * (2 + 2 * 8))
    assert tables.projections(1) == pytest.approx(2 * weights / 4.3e12)
    schemes = (tables.tensor_parallel_prefill, tables.ulysses_prefill, tables.ring_prefill)
    for scheme, last in zip(schemes, (1 / 4, 1 / 4, 7 / 16), strict=True):  # the last rank sees 7 of 16 half blocks
        assert scheme(1.0, False, 1) == pytest.approx(1 + alone)
        assert scheme(1.0, False, 4) == pytest.approx(last, rel=0.01)
        assert scheme(1.0, True, 4) == pytest.approx(1 / 4, rel=0.01)
    assert tables.tensor_parallel_decode(1.0, 1, 4) == pytest.approx(1 / 4, rel=0.01)
    assert tables.tensor_parallel_decode(1.0, 1, 64) == pytest.approx(1 / 8, rel=0.01)
    assert tables.ring_prefill(0.0, False, 64) > 62 * tables.hand_on(64, 64 * 2 * 512 * 16)
