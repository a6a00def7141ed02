"""Launches a kernel at little cost: after the first call of a kind the compiled kernel is found by a short key, and
Triton's
analysis of some sixty arguments is left out.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .compiling import compiling
from .tuning import Tile

_compiled: dict[tuple[Any, ...], Any] = {}


def _trait(argument: Any) -> Any:
    """What Triton compiles a pointer for: dtype and alignment to 16 bytes; a descriptor is always aligned."""
    if argument is None:
        return None
    if isinstance(argument, Tensor):
        return argument.dtype if argument.data_ptr() % 16 == 0 else (argument.dtype,)
    return argument.base.dtype


def launch(
    kernel: Any,
    grid: tuple[int, int, int],
    pointers: tuple[Any, ...],
    strides: tuple[int, ...],
    numbers: tuple[int | float, ...],
    constants: tuple[Any, ...],
    tile: Tile,
) -> None:
    """Launch `kernel` on the current device and stream.

    Args:
        kernel: takes pointers, strides, numbers and constants, in this order.
        pointers: tensors, tensor descriptors or None.
        strides: integers that the kernel is specialised for (1, or a multiple of 16).
        numbers: integers and floats that it is not specialised for.
        constants: the values of its constexpr arguments.
        tile: gives warps, stages and the register limit.
    """
    first = pointers[0] if isinstance(pointers[0], Tensor) else pointers[0].base
    if first.device.type == "cpu":
        kernel[grid](*pointers, *strides, *numbers, *constants)
        return
    traits = tuple([_trait(p) for p in pointers])
    steps = tuple([2 if s == 1 else s % 16 == 0 for s in strides])
    key = (id(kernel), first.device.index, traits, steps, max(strides) < 2**31, constants, tile.key)
    found = _compiled.get(key)
    if found is None:
        options = {"num_warps": tile.warps, "num_stages": tile.stages, "maxnreg": tile.registers}
        if "num_warps" in kernel.arg_names:
            constants, options = constants[:-1], {k: v for k, v in options.items() if k != "num_stages"}
        with compiling(kernel, constants, first.device):
            _compiled[key] = kernel[grid](*pointers, *strides, *numbers, *constants, **options)
        return
    found[grid](*pointers, *strides, *numbers, *constants)
