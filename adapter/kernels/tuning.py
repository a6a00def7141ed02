"""Tile sizes as data: one table for each compute capability, the first row that fits a call is used."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import BackendError

_TABLES = Path(__file__).with_name("tuning.json")
INTERPRETED = (0, 0)
"""The compute capability that stands for the interpreter."""


@dataclass(frozen=True)
class Tile:
    """How one kernel is cut: rows and columns of a tile, warps, pipeline stages, register limit, packed group, phases,
    and whether the kernel written for Hopper takes the calls that it can."""

    rows: int
    columns: int
    warps: int
    stages: int
    registers: int | None = None
    packed: bool = False
    phases: bool = True
    gluon: bool = False
    splits: int = 0
    """Decode: CTAs that one multiprocessor should get; 0 where it does not apply."""

    @functools.cached_property
    def key(self) -> tuple[int, int, int | None]:
        """What a compiled kernel depends on beside its constants."""
        return self.warps, self.stages, self.registers


def capability_of(device: torch.device) -> tuple[int, int]:
    """The compute capability of a device; INTERPRETED for the CPU."""
    return INTERPRETED if device.type == "cpu" else torch.cuda.get_device_capability(device)


@functools.cache
def tile_for(kernel: str, capability: tuple[int, int], width: int, itemsize: int, windowed: bool, rows: int) -> Tile:
    """The tile of `kernel` for a head dim of `width` (the greater of qk and v) and elements of `itemsize` bytes.

    Args:
        kernel: a key of the tables: "prefill", "backward_kv", "backward_q", "decode".
        capability: compute capability; the newest table that is not newer than it is used.
        windowed: a row sees few keys.
        rows: query rows of one kv head, the group included.

    Raises:
        BackendError: the compute capability is below that of every table.
    """
    for row in _table(capability)[kernel]:
        if _fits(row["when"], width, itemsize, windowed, rows):
            return Tile(**row["tile"])
    raise BackendError(f"no tile of {kernel} for head dim {width} and {itemsize}-byte elements")


def _fits(when: dict[str, Any], width: int, itemsize: int, windowed: bool, rows: int) -> bool:
    return bool(
        width <= when.get("width", width)
        and itemsize <= when.get("itemsize", itemsize)
        and windowed == when.get("windowed", windowed)
        and rows <= when.get("rows", rows)
    )


@functools.cache
def _table(capability: tuple[int, int]) -> dict[str, Any]:
    tables = json.loads(_TABLES.read_text())
    known = sorted((tuple(map(int, name.split("."))), table) for name, table in tables.items())
    fitting = [table for name, table in known if name <= capability]
    if not fitting or (capability < (8, 0) and capability != INTERPRETED):
        raise BackendError(
            f"compute capability {capability[0]}.{capability[1]} is below 8.0",
            fix='use backend="sdpa" or backend="eager" on this device',
        )
    table: dict[str, Any] = fitting[-1]
    return table
