"""--tp: the same tokens from several ranks, one error text when they fail, and nothing that runs on afterwards."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
import typer

from adapter.cli import ranks
from adapter.cli.app import app
from adapter.errors import ParallelError
from tests.parallel.support import needs_local_params

pytestmark = needs_local_params
SECONDS = 120
PROMPT = ("--prompt-ids", "5,6,7")


def command(*arguments):
    return [sys.executable, "-m", "sinkhold", *map(str, arguments)]


def run(*arguments):
    return subprocess.run(command(*arguments), capture_output=True, text=True, timeout=SECONDS)


def test_two_ranks_print_the_tokens_of_one(sinkhold, checkpoint):
    arguments = ("generate", checkpoint, *PROMPT, "--max-new-tokens", "8")
    split = run(*arguments, "--tp", "2")
    assert (split.returncode, split.stderr) == (0, "")
    assert split.stdout == sinkhold(*arguments).stdout == sinkhold(*arguments, "--tp", "1").stdout


@pytest.mark.parametrize("code", [0, 3])
def test_a_rank_ends_without_the_interpreters_own_end(code):
    script = f"""
import atexit
from adapter.cli.ranks import leaving_ranks
atexit.register(print, "ended")
with leaving_ranks():
    print("done")
    raise SystemExit({code})
"""
    alone = {**os.environ, "WORLD_SIZE": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", script], env=alone, capture_output=True, text=True, timeout=SECONDS)
    assert (done.returncode, done.stdout, done.stderr) == (code, "done\n", "")


@pytest.mark.slow
def test_verify_runs_its_probes_on_every_rank(checkpoint):
    done = run("verify", checkpoint, "--json", "--tp", "2")
    assert (done.returncode, done.stderr) == (0, "")
    probes = {probe["name"]: probe["status"] for probe in json.loads(done.stdout)["probes"]}
    assert probes.pop("save and load") == "skipped"
    assert probes["tensor parallel = single"] == "pass"
    assert set(probes.values()) == {"pass"}


@pytest.mark.parametrize("name", ["generate", "verify"])
def test_a_size_that_does_not_divide_is_refused_before_a_rank_starts(sinkhold, checkpoint, monkeypatch, name):
    monkeypatch.setattr(sys.modules[f"adapter.cli.{name}"], "run_as_ranks", lambda *_: pytest.fail("started"))
    result = sinkhold(name, checkpoint, *(PROMPT if name == "generate" else ()), "--tp", "3")
    assert result.exit_code == 3
    assert "[SINK-601] 4 query heads (and their sinks) do not divide by 3 ranks" in result.stderr
    assert "fix:   use one of these sizes: 1, 2, 4" in result.stderr


def test_more_ranks_than_gpus_are_refused(sinkhold, checkpoint, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    result = sinkhold("generate", checkpoint, *PROMPT, "--tp", "2")
    assert result.exit_code == 3
    assert "[SINK-601] 2 ranks are asked for, and this machine has 1 GPU\n" in result.stderr
    assert "use --tp 1, or hide the GPUs with CUDA_VISIBLE_DEVICES=" in result.stderr


def test_an_error_of_all_ranks_is_printed_once(checkpoint, tmp_path):
    broken = shutil.copytree(checkpoint, tmp_path / "broken")
    (broken / "model.safetensors").write_bytes(b"none")
    done = run("generate", broken, *PROMPT, "--tp", "2")
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.startswith("[SINK-407] 'model.safetensors' has 4 bytes")
    assert done.stderr.count("[SINK-") == 1
    assert "Traceback" not in done.stderr


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.fixture
def endless(checkpoint, tmp_path, request):
    """The command on two ranks that never stop by themselves; it and the ids of those that run, both or `param`."""
    wanted = getattr(request, "param", 2)
    folder = shutil.copytree(checkpoint, tmp_path / "endless")
    for name in ("config.json", "generation_config.json"):
        fields = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**fields, "eos_token_id": None}))
    arguments = command("generate", folder, *PROMPT, "--max-new-tokens", "1000000", "--tp", "2")
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + SECONDS
    while len(children(process.pid)) < wanted and time.monotonic() < deadline:
        time.sleep(0.002)
    started = children(process.pid)
    yield process, started
    for pid in (process.pid, *started):
        if Path(f"/proc/{pid}").exists():
            os.kill(pid, signal.SIGKILL)
    process.communicate()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("endless", [1, 2], indirect=True)
def test_ctrl_c_stops_every_rank(endless):
    process, started = endless
    assert started
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=SECONDS)
    assert (process.returncode, out, err) == (128 + signal.SIGINT, "", "")
    assert not [pid for pid in started if Path(f"/proc/{pid}").exists()]


def test_a_rank_that_the_launcher_forgot_is_ended():
    with ranks._ending_ranks():
        forgotten = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    assert not psutil.pid_exists(forgotten.pid)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_rank_that_is_killed_stops_the_others_and_is_named(endless):
    process, started = endless
    os.kill(started[1], signal.SIGKILL)
    _, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 3
    assert err.startswith("[SINK-601] rank 1 was killed by SIGKILL\n")
    assert not [pid for pid in started if Path(f"/proc/{pid}").exists()]


OWN, QUOTED = "[SINK-407] no header\n  where: here", "[SINK-601] rank 1 failed to load: [SINK-407] no header"


@pytest.mark.parametrize(
    ("codes", "said", "rank"),
    [
        ({0: 3, 1: 3}, {0: QUOTED, 1: OWN}, 1),
        ({0: 3}, {0: QUOTED, 1: OWN}, 1),
        ({0: 1, 1: -signal.SIGKILL}, {0: "connection reset", 1: ""}, 1),
        ({0: -signal.SIGTERM, 1: 1}, {0: "", 1: "Traceback (most recent call last)"}, 1),
        ({0: 1, 1: 1}, {1: "first", 0: "second"}, 1),
        ({1: 1}, {0: "", 1: ""}, 1),
    ],
)
def test_the_rank_that_failed_first_is_the_one_that_speaks(codes, said, rank):
    assert ranks._culprit(codes, said) == rank


@pytest.fixture
def context():
    return typer.Context(typer.main.get_command(app))


def test_an_unforeseen_error_is_one_line_in_the_usual_form_and_all_of_it_with_debug(context, capsys):
    text = "Traceback (most recent call last):\n  here\nMemoryError: too much"
    with pytest.raises(ParallelError, match="rank 1 ended with exit code 1: MemoryError: too much"):
        ranks._pass_on({1: 1}, {1: text}, context)
    assert capsys.readouterr().err == ""
    context.params["debug"] = True
    with pytest.raises(ParallelError, match="too much"):
        ranks._pass_on({1: 1}, {1: text}, context)
    assert capsys.readouterr().err.strip() == text


@pytest.fixture
def launched(monkeypatch):
    handler = signal.getsignal(signal.SIGINT)
    monkeypatch.setenv("WORLD_SIZE", "2")
    yield
    signal.signal(signal.SIGINT, handler)


@pytest.mark.usefixtures("launched")
def test_ranks_of_torchrun_are_used_as_they_are():
    assert not ranks.needs_ranks(2)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
    assert not ranks.needs_ranks(1)
    with pytest.raises(ParallelError, match="--tp 4 is asked for, and torchrun has started 2 ranks"):
        ranks.needs_ranks(4)
