"""The tiles that tuning tries: grids as data, one table for each compute capability."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from .kinds import Kind
from .tuning import Tile, first_fitting, tile_for, tile_of

_GRIDS = Path(__file__).with_name("candidates.json")


def candidates(kind: Kind, capability: tuple[int, int], rows: int) -> list[Tile]:
    """The shipped tile, then every other one of the grids.

    Args:
        capability: compute capability; tables are chosen as in `tile_for`.
        rows: query rows of one kv head, the group included.

    Raises:
        BackendError: the compute capability is below 8.0.
    """
    call = (kind.width, kind.dtype.itemsize, kind.windowed, rows)
    shipped = tile_for(kind.kernel, capability, *call)
    grids = first_fitting(_GRIDS, capability, kind.kernel, *call)["grids"]
    return list(dict.fromkeys([shipped, *(tile_of(tile) for grid in grids for tile in _spread(grid))]))


def _spread(grid: dict[str, list[Any]]) -> list[dict[str, Any]]:
    """Every combination of a grid's values."""
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
