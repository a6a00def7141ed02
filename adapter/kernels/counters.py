"""Arrival counters on the device: zero before every use, and zero again after it."""

from __future__ import annotations

import torch
from torch import Tensor

_SLOTS = 1 << 16
_pools: dict[torch.device, _Pool] = {}


class _Pool:
    """A ring of counters. Every call gets slots of its own, so that graphs replayed side by side do not meet."""

    def __init__(self, device: torch.device) -> None:
        self.slots = torch.zeros(_SLOTS, dtype=torch.int32, device=device)
        self.next = 0

    def take(self, number: int) -> Tensor:
        if self.next + number > _SLOTS:
            self.next = 0
        first, self.next = self.next, self.next + number
        return self.slots[first : first + number]


def take(number: int, device: torch.device) -> Tensor:
    """`number` int32 zeros. A kernel that counts in them must set them back to zero."""
    if number > _SLOTS:
        return torch.zeros(number, dtype=torch.int32, device=device)
    pool = _pools.get(device)
    if pool is None:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            # Memory of a graph must not outlive it, so these zeros are written again by every replay.
            return torch.zeros(number, dtype=torch.int32, device=device)
        pool = _pools[device] = _Pool(device)
    return pool.take(number)
