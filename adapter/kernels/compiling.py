"""A line in the log while a kernel compiles for long, so that a first call is never silent for minutes."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

EVERY = 10.0
"""Seconds before the first line, and between two."""
_log = logging.getLogger(__name__)


@contextmanager
def compiling(kernel: Any, constants: tuple[Any, ...], device: torch.device) -> Iterator[None]:
    """Log a warning every ten seconds until the block is left.

    Args:
        kernel: the Triton function; its last arguments take `constants`.
        device: what it is compiled for.
    """
    over = threading.Event()
    teller = threading.Thread(target=_tell, args=(_described(kernel, constants, device), over), daemon=True)
    teller.start()
    try:
        yield
    finally:
        over.set()
        teller.join()


def _tell(what: str, over: threading.Event) -> None:
    seconds = 0.0
    while not over.wait(EVERY):
        seconds += EVERY
        _log.warning("compiling %s, %.0f s so far", what, seconds)


def _described(kernel: Any, constants: tuple[Any, ...], device: torch.device) -> str:
    names = [name for name in kernel.arg_names if name != "num_warps"]
    named = dict(zip(names[len(names) - len(constants) :], constants, strict=True))
    name = f"the {kernel.__module__.rpartition('.')[2]} kernel"
    if "WIDTH" in named:
        name += f" for head dim {named['WIDTH']}"
    if device.type != "cuda":
        return name
    major, minor = torch.cuda.get_device_capability(device)
    return f"{name} on sm_{major}{minor}"
