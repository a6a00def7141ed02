"""Starts scripts with torchrun as a user does, on the CPU; what it starts ends with the test."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path(__file__).parents[2]
WAITS = 45
"""Seconds that a rank waits for the others."""


@dataclass(frozen=True)
class Ended:
    """A torchrun that has ended: its exit code, and what its ranks and it wrote to stdout and stderr."""

    code: int
    said: str


def torchrun(folder: Path, *agents: list[object], timeout: float = 120) -> list[Ended]:
    """Run agents of torchrun side by side until all have ended.

    Args:
        folder: where their output is kept.
        agents: the arguments of each.
        timeout: seconds after which TimeoutExpired is raised and all are stopped.
    """
    environment = {
        **os.environ, "PYTHONPATH": str(_ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
        "SINKHOLD_TIMEOUT_SECONDS": str(WAITS),
    }  # fmt: skip
    logs = [folder / f"agent{number}.log" for number in range(len(agents))]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for log, arguments in zip(logs, agents, strict=True):
            command = [sys.executable, "-m", "torch.distributed.run", *map(str, arguments)]
            with log.open("wb") as file:
                processes.append(subprocess.Popen(command, env=environment, stdout=file, stderr=file))
        codes = [process.wait(timeout) for process in processes]
    finally:
        for process in processes:
            _stop(process)
    return [Ended(code, log.read_text(errors="replace")) for code, log in zip(codes, logs, strict=True)]


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()  # the agent stops its ranks, which are in sessions of their own
    try:
        process.wait(40)
    except subprocess.TimeoutExpired:
        process.kill()


def free_port(host: str) -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port
