"""Sizes that launchers share: head dims cut into powers of two, strides, the current device."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager

import torch
from torch import Tensor

SMALLEST_DOT = 16
"""The least extent of a matrix product on tensor cores."""


def halves(width: int) -> tuple[int, int]:
    """A head dim as one or two power-of-two blocks: 64 -> (64, 0), 192 -> (128, 64), 80 -> (64, 16), 24 -> (16, 16)."""
    first = SMALLEST_DOT
    while first * 2 <= width:
        first *= 2
    rest = width - first
    return first, 0 if rest <= 0 else max(SMALLEST_DOT, ceil_power_of_two(rest))


def ceil_power_of_two(number: int) -> int:
    """The least power of two that is not below `number`."""
    return 1 << max(0, number - 1).bit_length()


def ceil_div(number: int, by: int) -> int:
    """Division rounded up."""
    return -(-number // by)


def rows_ready(tensor: Tensor) -> Tensor:
    """The tensor itself when its last dimension is dense and its rows are aligned to 16 bytes, else a contiguous
    copy."""
    *steps, last = tensor.stride()
    if last == 1 and tensor.data_ptr() % 16 == 0:
        size = tensor.element_size()
        if (steps[0] | steps[1] | steps[2]) * size % 16 == 0:
            return tensor
        if all(s * size % 16 == 0 or n == 1 for s, n in zip(steps, tensor.shape, strict=False)):
            return tensor
    return tensor.contiguous()


def on_device_of(tensor: Tensor) -> AbstractContextManager[object]:
    """Make the tensor's CUDA device the current one while a kernel is launched."""
    if tensor.device.type != "cuda" or tensor.device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(tensor.device)
