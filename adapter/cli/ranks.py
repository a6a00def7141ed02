"""One command as several ranks on this machine, started with torchrun's own launcher."""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, NoReturn

import psutil
import torch
import torch.distributed as dist
import typer

from ..errors import ParallelError
from .console import ARGUMENTS, ExitCode, err

TpOption = Annotated[
    int, typer.Option("--tp", min=1, metavar="N", help="Split the model over N ranks, started on this machine.")
]
_LAUNCHED = "WORLD_SIZE"
_SCRIPT = Path(__file__).resolve().parents[2] / "sinkhold.py"
_OWN_WORDS = (ExitCode.CHECK_FAILED, ExitCode.USAGE, ExitCode.REFUSED)
_HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_TRACEBACK = "Traceback (most recent call last)"


def is_launched() -> bool:
    """Whether this process is a rank that torchrun, or `run_as_ranks`, has started."""
    return _LAUNCHED in os.environ


def is_first() -> bool:
    """Whether this process prints: the only one, or rank 0."""
    return os.environ.get("RANK", "0") == "0"


def gathered(text: str) -> list[str]:
    """The text of every rank, in their order; every rank must call it."""
    if not dist.is_initialized():
        return [text]
    found = [""] * dist.get_world_size()
    dist.all_gather_object(found, text)
    return found


def needs_ranks(ranks: int) -> bool:
    """Whether the command has to be started again as `ranks` processes.

    Raises:
        ParallelError: torchrun has started another number of ranks.
    """
    if ranks == 1 or not is_launched():
        return ranks > 1
    started = int(os.environ[_LAUNCHED])
    if started != ranks:
        raise ParallelError(
            f"--tp {ranks} is asked for, and torchrun has started {started} ranks",
            why="a model split for another number of ranks would wait for ranks that do not exist",
            fix=f"start {ranks} ranks, or give --tp {started}",
        )
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python's own handler waits until a collective returns
    return False


@contextmanager
def leaving_ranks() -> Iterator[None]:
    """A rank ends without the interpreter's own end, in which a thread of a communicator may abort the process.

    One that failed leaves its communicator as it is: others still wait on it.
    """
    if not is_launched():
        yield
        return
    code: Any = 0
    try:
        yield
    except SystemExit as left:
        code = left.code or 0
    except Exception as error:  # noqa: BLE001 - shown as Python shows it
        sys.excepthook(type(error), error, error.__traceback__)
        code = ExitCode.CHECK_FAILED
    if not code and dist.is_initialized():
        dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run_as_ranks(ranks: int, context: typer.Context) -> NoReturn:
    """Run the command line of `context` again as `ranks` ranks, and exit as they do.

    Rank 0 prints; what a failing rank says on stderr is printed once.

    Raises:
        ParallelError: this machine has fewer GPUs, or a rank ended without an error of its own.
        typer.Exit: with the exit code of the ranks.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    _check_devices(ranks)
    with tempfile.TemporaryDirectory(prefix="sinkhold-") as folder, _surroundings(ranks), _ending_ranks():
        redirects = {rank: Std.ERR if rank == 0 else Std.ALL for rank in range(ranks)}
        config = LaunchConfig(
            min_nodes=1, max_nodes=1, nproc_per_node=ranks, max_restarts=0, run_id=uuid.uuid4().hex,
            rdzv_backend="c10d", rdzv_endpoint="localhost:0", local_addr="localhost",
            logs_specs=DefaultLogsSpecs(log_dir=folder, redirects=redirects),
        )  # fmt: skip
        try:
            elastic_launch(config, sys.executable)(str(_SCRIPT), *context.meta[ARGUMENTS])
        except SignalException as stopped:
            raise typer.Exit(128 + stopped.sigval) from None
        except ChildFailedError as failed:
            codes = {rank: failure.exitcode for rank, failure in failed.failures.items()}
            _pass_on(codes, _said(Path(folder)), context)
        _write(_said(Path(folder)).get(0, ""))
    raise typer.Exit(ExitCode.OK)


def _check_devices(ranks: int) -> None:
    devices = torch.cuda.device_count() if torch.cuda.is_available() else ranks
    if devices < ranks:
        raise ParallelError(
            f"{ranks} ranks are asked for, and this machine has {devices} GPU{'s' if devices > 1 else ''}",
            why="each rank needs a device of its own; two ranks on one GPU would wait for each other for ever",
            fix=f"use --tp {devices}, or hide the GPUs with CUDA_VISIBLE_DEVICES= to split over the CPU",
        )


@contextmanager
def _surroundings(ranks: int) -> Iterator[None]:
    """What the ranks inherit: their part of the cores, no chatter of the launcher; afterwards all is as it was."""
    handlers = {number: signal.getsignal(number) for number in _HANDLED}
    environment = dict(os.environ)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    launcher = logging.getLogger("torch.distributed.elastic")
    quiet = logging.NullHandler()
    launcher.addHandler(quiet)
    propagate, launcher.propagate = launcher.propagate, False
    try:
        yield
    finally:
        launcher.propagate = propagate
        launcher.removeHandler(quiet)
        os.environ.clear()
        os.environ.update(environment)
        for number, handler in handlers.items():
            signal.signal(number, handler)


@contextmanager
def _ending_ranks() -> Iterator[None]:
    """No rank outlives the command: the launcher forgets those that a signal stops it from starting."""
    command = psutil.Process()
    others = command.children()
    try:
        yield
    finally:
        started = [child for child in command.children() if child not in others]
        for child in started:
            with suppress(psutil.NoSuchProcess):
                child.kill()
        psutil.wait_procs(started)


def _said(folder: Path) -> dict[int, str]:
    """Rank -> its stderr, kept in a folder named after the rank; the one that fell silent first comes first."""
    files = sorted(folder.rglob("stderr.log"), key=lambda file: file.stat().st_mtime_ns)
    return {int(file.parent.name): file.read_text(errors="replace").strip() for file in files}


def _pass_on(codes: dict[int, int], said: dict[int, str], context: typer.Context) -> NoReturn:
    """Print once what the rank said that failed first, and exit with its code.

    Args:
        codes: exit code of each rank that ended by itself; the launcher has stopped the others.
        said: as from `_said`.
        context: its root says whether tracebacks are wanted.
    """
    rank = _culprit(codes, said)
    code, text = codes.get(rank, next(iter(codes.values()))), said.get(rank, "")
    if code in _OWN_WORDS and _TRACEBACK not in text:
        _write(text)
        raise typer.Exit(code)
    if context.find_root().params.get("debug"):
        _write(text)
    ended = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    last = text.splitlines()[-1] if text else ""
    raise ParallelError(
        f"rank {rank} {ended}" + (f": {last}" if last else ""),
        why="the other ranks would wait for it for ever; all have been stopped",
        fix="start it again with sinkhold --debug to see all that it said; SIGKILL is mostly memory that ran out",
    )


def _culprit(codes: dict[int, int], said: dict[int, str]) -> int:
    """The rank that was killed, or else the one whose words the others repeat, or else the first that ended."""
    killed = [rank for rank, code in codes.items() if code < 0 and code != -signal.SIGTERM]
    if killed:
        return killed[0]
    heads = {rank: text.splitlines()[0] for rank, text in said.items() if text.startswith("[SINK-")}
    if heads:
        return max(heads, key=lambda rank: sum(heads[rank] in text for text in said.values()))
    own = [rank for rank, code in codes.items() if code != -signal.SIGTERM] or list(codes)
    return next((rank for rank in said if rank in own), own[0])


def _write(text: str) -> None:
    if text:
        err().print(text)
