"""All ranks load, or all stop with the error of the one that failed."""

from __future__ import annotations

import os
from datetime import timedelta
from types import TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ..errors import ParallelError

TIMEOUT_VARIABLE = "SINKHOLD_TIMEOUT_SECONDS"
_DEFAULT_SECONDS = 1800
Joined = TypeVar("Joined", bound="Agreement")


def world_size() -> int:
    """Ranks of this run, started or not."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))


def start_ranks() -> None:
    """Join the process group that torchrun describes, with a timeout, unless it was joined already.

    Raises:
        ParallelError: the environment names no rank, or the other ranks do not come.
    """
    if dist.is_initialized() or world_size() == 1:
        return
    missing = [n for n in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if n not in os.environ]
    if missing:
        raise ParallelError(
            f"WORLD_SIZE is {world_size()}, but {', '.join(missing)} is not set",
            why="a rank that does not know its number can only wait for ever",
            fix="start the script with torchrun --nproc-per-node N script.py",
        )
    seconds = float(os.environ.get(TIMEOUT_VARIABLE, _DEFAULT_SECONDS))
    device = None
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        device = torch.device("cuda", torch.cuda.current_device())
    try:
        dist.init_process_group("nccl" if device else "gloo", timeout=timedelta(seconds=seconds), device_id=device)
    except (dist.DistError, RuntimeError, ValueError) as error:
        raise ParallelError(
            f"the ranks did not come together: {error}".splitlines()[0],
            why="this rank would wait for the others for ever",
            fix="start all ranks with the same rendezvous address and check that it can be reached",
        ) from error


class Agreement:
    """A block that every rank leaves without an error, or none does.

    A rank's own error is raised on that rank; every other rank raises a ParallelError that quotes it.
    """

    def __enter__(self: Joined) -> Joined:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
            return
        if error is not None and not isinstance(error, Exception):
            return  # an interrupt: the launcher stops the others
        said: list[Any] = [None] * dist.get_world_size()
        own = f"{type(error).__name__}: {error}" if error is not None else None
        try:
            dist.all_gather_object(said, own)
        except RuntimeError as broken:
            if error is not None:
                return  # it says more than the silence of another rank
            raise ParallelError(
                f"another rank ended while it loaded, or did not answer in time: {broken}".splitlines()[0],
                why="a model that only some ranks hold would hang at its first collective",
                fix=f"see what the other ranks print; {TIMEOUT_VARIABLE} sets how long a rank waits for them",
            ) from broken
        failed = [(rank, text) for rank, text in enumerate(said) if text is not None]
        if failed and error is None:
            rank, text = failed[0]
            raise ParallelError(
                f"rank {rank} failed to load: {text}",
                why="a model that only some ranks hold would hang at its first collective",
                fix=f"mend what rank {rank} reports; all ranks have stopped",
            )
