"""How many bytes of a model this rank holds, and the sinks of which heads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn

_TENSOR = "tp"
"""transformers' name of the mesh dimension that stays split in a forward under FSDP."""


@dataclass(frozen=True)
class Shards:
    """Bytes of parameters: `split` counts the tensors that are spread over ranks, `held` what this rank has of them,
    `whole` the tensors that every rank holds in full."""

    ranks: int
    split: int
    held: int
    whole: int

    @property
    def share(self) -> float:
        """The part of the split bytes that this rank holds; 1/ranks when all divide evenly."""
        return self.held / self.split if self.split else 1.0

    def __str__(self) -> str:
        return (
            f"{self.ranks} ranks: this one holds {self.held:,} of {self.split:,} split bytes ({self.share:.1%}) "
            f"and {self.whole:,} bytes that every rank holds"
        )


@dataclass(frozen=True)
class SinkShard:
    """The sinks of one layer on this rank: those of the heads `start` to `stop` - 1 of all `heads`.

    Args:
        used: heads that this rank's forward sees; more than it holds where FSDP gathers them for each forward.
    """

    rank: int
    heads: int
    start: int
    stop: int
    used: int

    @property
    def held(self) -> int:
        """Heads whose sinks are on this rank."""
        return self.stop - self.start

    def __str__(self) -> str:
        if self.held == self.heads:
            return "all heads on every rank"
        heads = f"heads {self.start}:{self.stop}" if self.held else "no head"
        return f"{heads} on rank {self.rank}" + (f", {self.used} in each forward" if self.used > self.held else "")


def shards_of(model: nn.Module) -> Shards:
    """What this rank holds of `model`; asks no other rank."""
    split = held = whole = 0
    ranks = 1
    for parameter in model.parameters():
        size = parameter.element_size()
        mesh = getattr(parameter, "device_mesh", None)
        if mesh is None:
            whole += parameter.numel() * size
            continue
        ranks = max(ranks, mesh.size())
        local = parameter.to_local()  # type: ignore[attr-defined]
        if local.numel() == parameter.numel():
            whole += parameter.numel() * size
        else:
            split, held = split + parameter.numel() * size, held + local.numel() * size
    return Shards(ranks, split, held, whole)


def is_fsdp(model: nn.Module) -> bool:
    """Whether FSDP2 manages parameters of `model`."""
    if not any(hasattr(parameter, "device_mesh") for parameter in model.parameters()):
        return False
    from torch.distributed.fsdp import FSDPModule

    return any(isinstance(module, FSDPModule) for module in model.modules())


def sink_shard(sinks: Any, *, fsdp: bool = False) -> SinkShard:
    """Which heads of the per-head sinks [num_heads], a parameter or a DTensor, this rank holds.

    Args:
        fsdp: as from `is_fsdp` of their model.
    """
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    heads = int(sinks.numel())
    mesh = getattr(sinks, "device_mesh", None)
    if mesh is None:
        return SinkShard(rank, heads, 0, heads, heads)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    (count, *_), (start, *_) = compute_local_shape_and_global_offset(sinks.shape, mesh, sinks.placements)
    names = mesh.mesh_dim_names or ()
    used = count if not fsdp else heads // (mesh[_TENSOR].size() if _TENSOR in names else 1)
    return SinkShard(rank, heads, min(start, heads), min(start, heads) + count, used)
