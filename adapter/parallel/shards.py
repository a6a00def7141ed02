"""How many bytes of a model this rank holds."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn


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
