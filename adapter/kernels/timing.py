"""The calls that tuning times, and the clocks."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch
import triton.testing
from torch import Tensor

from . import backward, decode, prefill
from .kinds import Kernel, Length
from .layer_shape import LayerShape
from .tuning import Tile

Run = Callable[[], object]
Clock = Callable[[Run], float]
"""Microseconds of one run."""
_TOKENS: dict[Length, int] = {"short": 1024, "middle": 4096, "long": 16384}
_INTERPRETED_TOKENS = 32


def tokens_of(kernel: Kernel, length: Length, device: torch.device) -> tuple[int, int]:
    """Queries and keys of the call that stands for a length; a few in the interpreter."""
    keys = _INTERPRETED_TOKENS if device.type == "cpu" else _TOKENS[length]
    return (1 if kernel == "decode" else keys), keys


def prepared(shape: LayerShape, kernel: Kernel, length: Length, device: torch.device) -> Callable[[Tile], Run]:
    """Random tensors of one sequence with sinks around +2; gives, for a tile, the call to time."""
    q_length, kv_length = tokens_of(kernel, length, device)

    def rows(number: int, heads: int, width: int) -> Tensor:
        # Tokens outside heads, as projections leave them.
        return torch.randn(1, number, heads, width, device=device, dtype=shape.dtype).transpose(1, 2)

    query = rows(q_length, shape.num_heads, shape.qk_head_dim)
    key = rows(kv_length, shape.num_kv_heads, shape.qk_head_dim)
    value = rows(kv_length, shape.num_kv_heads, shape.v_head_dim)
    sinks = torch.randn(shape.num_heads, device=device) + 2
    scale, masking = shape.qk_head_dim**-0.5, shape.masking(kv_length - q_length)
    arguments = (query, key, value, sinks, scale, None, masking)
    if kernel == "decode":
        return lambda tile: partial(decode.attend, *arguments, tile=tile)
    if kernel == "prefill":
        return lambda tile: partial(prefill.attend, *arguments, tile=tile)
    out, lse = prefill.attend(*arguments)
    given = (query, key, value, sinks, out, lse, torch.randn_like(out), None, scale, None, masking)
    return lambda tile: partial(backward.gradients, *given, *backward_tiles(kernel, tile))


def backward_tiles(kernel: Kernel, tile: Tile) -> tuple[Tile | None, Tile | None]:
    """What `backward.gradients` takes as kv_tile and q_tile when one of its kernels is cut by `tile`."""
    return (tile, None) if kernel == "backward_kv" else (None, tile)


def cuda_clock(run: Run) -> float:
    """The median of many runs between CUDA events, the L2 cache emptied before each."""
    return 1000 * float(triton.testing.do_bench(run, return_mode="median"))


def wall_clock(run: Run) -> float:
    """One run in the interpreter, which says nothing about any device."""
    started = time.perf_counter()
    run()
    return 1e6 * (time.perf_counter() - started)
