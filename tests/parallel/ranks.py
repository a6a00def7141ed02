"""Runs a function on several gloo ranks, as torchrun would, and brings their results back; nothing here can hang."""

from __future__ import annotations

import io
import multiprocessing
import os
import socket
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.parallel.preload"])


class RankFailed(AssertionError):
    """A rank raised, died or did not answer in time; `texts` holds what each rank said."""

    def __init__(self, texts: dict[int, str]) -> None:
        self.texts = texts
        super().__init__("\n".join(f"rank {rank}: {text}" for rank, text in sorted(texts.items())))


def run_ranks(
    ranks: int, worker: Callable[..., Any], *args: Any, timeout: float = 120, host: str = "127.0.0.1"
) -> list[Any]:
    """The results of `worker(*args)` on every rank, in their order. Raises RankFailed when any rank fails."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        port = probe.getsockname()[1]
    pipes, processes = [], []
    for rank in range(ranks):
        ours, theirs = _CONTEXT.Pipe(duplex=False)
        environment = {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": host, "MASTER_PORT": str(port), "SINKHOLD_TIMEOUT_SECONDS": str(timeout / 2),
        }  # fmt: skip
        process = _CONTEXT.Process(target=_rank, args=(environment, theirs, worker, args), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        return _collect(pipes, timeout)
    finally:
        for process in processes:
            process.terminate()
            process.join(5)


def _collect(pipes: list[Connection], timeout: float) -> list[Any]:
    results: dict[int, Any] = {}
    failed: dict[int, str] = {}
    deadline = time.monotonic() + timeout
    while open_pipes := [pipe for rank, pipe in enumerate(pipes) if rank not in results and rank not in failed]:
        ready = wait(open_pipes, max(0, deadline - time.monotonic()))
        if not ready:
            break
        for pipe in ready:
            rank = pipes.index(pipe)  # type: ignore[arg-type]
            try:
                good, value = pipe.recv()  # type: ignore[union-attr]
            except EOFError:
                good, value = False, "the process died"
            (results if good else failed)[rank] = value
    missing = set(range(len(pipes))) - results.keys() - failed.keys()
    failed |= dict.fromkeys(missing, f"no answer within {timeout} s")
    if failed:
        raise RankFailed(failed)
    return [torch.load(io.BytesIO(results[rank]), weights_only=False) for rank in range(len(pipes))]


def _rank(environment: dict[str, str], pipe: Connection, worker: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.environ.update(environment)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    try:
        result = worker(*args)
    except BaseException as error:  # noqa: BLE001 - the test process reads it
        pipe.send((False, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))
    else:
        packed = io.BytesIO()
        torch.save(result, packed)  # by value: shared memory would go with this process
        pipe.send((True, packed.getvalue()))
    finally:
        pipe.close()
        os._exit(0)  # leaving the process group politely would wait for ranks that have failed
