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
_OLDEST = (8, 0)
_BLOCKS = (16, 32, 64, 128, 256)
_WARPS = (1, 2, 4, 8, 16)
_FLAGS = ("packed", "phases", "gluon")
_MOST = {"stages": 8, "registers": 255, "splits": 64}


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


def tile_of(data: Any) -> Tile:
    """A tile as JSON holds it.

    Raises:
        ValueError: a field is unknown or missing, or its value is none that a kernel can be cut by.
    """
    if not isinstance(data, dict):
        raise ValueError(f"a tile is {data!r}")
    for name, value in data.items():
        if not _is_possible(name, value):
            raise ValueError(f"a tile has {name} = {value!r}")
    try:
        return Tile(**data)
    except TypeError as error:
        raise ValueError(f"a tile is not complete: {error}") from error


def _is_possible(name: str, value: Any) -> bool:
    if name in _FLAGS:
        return isinstance(value, bool)
    if name == "registers" and value is None:
        return True
    if not isinstance(value, int) or isinstance(value, bool):
        return False
    if name in ("rows", "columns"):
        return value in _BLOCKS
    if name == "warps":
        return value in _WARPS
    return name in _MOST and (0 if name == "splits" else 1) <= value <= _MOST[name]


def capability_of(device: torch.device) -> tuple[int, int]:
    """The compute capability of a device; INTERPRETED for the CPU."""
    return INTERPRETED if device.type == "cpu" else torch.cuda.get_device_capability(device)


@functools.cache
def tile_for(kernel: str, capability: tuple[int, int], width: int, itemsize: int, windowed: bool, rows: int) -> Tile:
    """The shipped tile of a kernel.

    Args:
        kernel: a key of the tables: "prefill", "backward_kv", "backward_q", "decode".
        capability: compute capability; the table of its major version is used, and that of 8.0 where there is none.
        width: the greater of the head dims of qk and v.
        itemsize: bytes of an element.
        windowed: a row sees few keys.
        rows: query rows of one kv head, the group included.

    Raises:
        BackendError: the compute capability is below 8.0.
    """
    return tile_of(first_fitting(_TABLES, capability, kernel, width, itemsize, windowed, rows)["tile"])


def first_fitting(
    file: Path, capability: tuple[int, int], kernel: str, width: int, itemsize: int, windowed: bool, rows: int
) -> dict[str, Any]:
    """The first row of a file of tables that fits a call; arguments and errors as of `tile_for`."""
    for row in _table(file, capability)[kernel]:
        if _fits(row["when"], width, itemsize, windowed, rows):
            found: dict[str, Any] = row
            return found
    raise BackendError(f"no tile of {kernel} for head dim {width} and {itemsize}-byte elements")


def _fits(when: dict[str, Any], width: int, itemsize: int, windowed: bool, rows: int) -> bool:
    return bool(
        width <= when.get("width", width)
        and itemsize <= when.get("itemsize", itemsize)
        and windowed == when.get("windowed", windowed)
        and rows <= when.get("rows", rows)
    )


@functools.cache
def _table(file: Path, capability: tuple[int, int]) -> dict[str, Any]:
    tables: dict[str, dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))
    known = {(int(major), int(minor)): tables[f"{major}.{minor}"] for major, minor in (n.split(".") for n in tables)}
    if capability < _OLDEST and capability != INTERPRETED:
        raise BackendError(
            f"compute capability {capability[0]}.{capability[1]} is below 8.0",
            fix='use backend="sdpa" or backend="eager" on this device',
        )
    # What is tuned for one generation may not even compile for the next; what 8.0 can run, every newer one can.
    own = [name for name in known if name[0] == capability[0] and name <= capability]
    return known[max(own, default=_OLDEST)]
