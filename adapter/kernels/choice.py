"""The tile of a call: the one tuned on this machine, else the shipped one."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from .kinds import Kernel, Kind, Length, length_of
from .tuned_file import tuned_tiles
from .tuning import Tile, capability_of, tile_for


def tile_on(kernel: Kernel, query: Tensor, value: Tensor, kv_heads: int, kv_length: int, windowed: bool) -> Tile:
    """The tile of `kernel` for a call on the query's device.

    Args:
        query: [batch, num_heads, q_length, qk_head_dim].
        value: [..., v_head_dim].
        kv_length: keys, unwritten slots of a cache included.
        windowed: a row sees few keys.

    Raises:
        BackendError: the compute capability is below 8.0, or the file of tuned tiles cannot be read.
    """
    _, heads, q_length, width = query.shape
    group = heads // kv_heads
    return _chosen(
        kernel, query.device, query.dtype, width, value.shape[-1], group, windowed, q_length * group,
        length_of(kv_length),
    )  # fmt: skip


@functools.cache
def _chosen(
    kernel: Kernel,
    device: torch.device,
    dtype: torch.dtype,
    width: int,
    v_width: int,
    group: int,
    windowed: bool,
    rows: int,
    length: Length,
) -> Tile:
    shipped = tile_for(kernel, capability_of(device), max(width, v_width), dtype.itemsize, windowed, rows)
    return tuned_tiles(device).get(Kind(kernel, dtype, width, v_width, group, windowed, length), shipped)


def forget() -> None:
    """Let the next call read the file of tuned tiles again."""
    _chosen.cache_clear()
    tuned_tiles.cache_clear()
