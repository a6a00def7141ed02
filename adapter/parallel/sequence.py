"""One forward's sequence, spread over ranks: where this rank stands in it, and what hides which of all keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..backends.call import Visibility
from ..errors import ParallelError
from .batch import gather

_ALIKE = "batch", "tokens", "attention_mask", "position_ids"


@dataclass(frozen=True, eq=False)
class Sequence:
    """The sequence of one forward.

    Args:
        rank, size: this rank's part, and of how many; parts lie in the order of the ranks.
        length: tokens of each part.
        padding: [batch, size * length] bool, True where a key is real; None where all are.
        documents: [batch, size * length] integers, the packed document of each token; None for one document.
    """

    rank: int
    size: int
    length: int
    padding: Tensor | None
    documents: Tensor | None

    def spread(self, visibility: Visibility) -> Visibility:
        """What this rank's queries see of all keys, for a mask that the model built for its own part alone.

        Raises:
            ParallelError: the mask hides keys by what only the whole sequence could tell.
        """
        obstacle = mask_obstacle(visibility)
        if obstacle is None and (visibility.q_length, visibility.kv_length) != (self.length, self.length):
            obstacle = (
                f"a mask for {visibility.q_length} queries and {visibility.kv_length} keys, "
                f"where each rank has {self.length} tokens"
            )
        if obstacle is not None:
            raise ParallelError(obstacle, why=MASK_WHY, fix=RUN_WHOLE)
        start = self.rank * self.length
        documents = self.documents
        return Visibility(
            visibility.batch_size,
            self.length,
            self.size * self.length,
            q_offset=start,
            left=visibility.left,
            right=visibility.right,
            documents=documents,
            query_documents=None if documents is None else documents[:, start : start + self.length],
            padding=self.padding,
        )


MASK_WHY = "made from a part of the sequence it would hide the wrong keys"
RUN_WHOLE = "run this model without context parallelism"


def mask_obstacle(visibility: Visibility) -> str | None:
    """Why a mask that was built for a part of the sequence says nothing about the whole; None where it does."""
    if visibility.dense is not None:
        return "a mask that has no other description than one value for each query and key"
    if visibility.chunk_size is not None:
        return "a mask of chunks, whose edges are counted from the first token"
    return None


def sequence_of(inputs: Mapping[str, Any], group: dist.ProcessGroup) -> tuple[Sequence, Tensor]:
    """The sequence that the ranks' inputs are parts of, and the position ids [batch, length] of this rank.

    Args:
        inputs: this rank's `input_ids` or `inputs_embeds`, `position_ids` and `attention_mask`, the last two or None.
        group: the ranks; all must call it.

    Raises:
        ParallelError: on every rank, when the parts do not fit together.
    """
    tokens = inputs["input_ids"] if inputs.get("input_ids") is not None else inputs["inputs_embeds"]
    batch, length = tokens.shape[:2]
    mask, positions = inputs.get("attention_mask"), inputs.get("position_ids")
    _check_alike([batch, length, int(mask is not None), int(positions is not None)], tokens.device, group)
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    documents = padding = None
    if positions is None:
        positions = torch.arange(rank * length, (rank + 1) * length, device=tokens.device).expand(batch, -1)
    elif mask is None:
        documents = _documents(torch.cat(gather(positions.expand(batch, -1), group), dim=1))
    if mask is not None:
        padding = torch.cat(gather(mask.to(tokens.device, torch.bool), group), dim=1)
        padding = None if bool(padding.all()) else padding
    return Sequence(rank, size, length, padding, documents), positions


def _documents(positions: Tensor) -> Tensor | None:
    """transformers' own rule: without a padding mask and without a cache, any step but one begins a document."""
    jumps = positions.diff(dim=-1) != 1
    if not bool(jumps.any()):
        return None
    return torch.nn.functional.pad(jumps.cumsum(-1), (1, 0))


def _check_alike(own: list[int], device: torch.device, group: dist.ProcessGroup) -> None:
    said = torch.stack(gather(torch.tensor(own, device=device), group)).tolist()
    for name, values in zip(_ALIKE, zip(*said, strict=True), strict=True):
        if len(set(values)) > 1:
            what = f"{values} {name}" if name in ("batch", "tokens") else f"{name} on {sum(values)} of {len(values)}"
            raise ParallelError(
                f"the ranks hold unlike parts of the sequence: {what}",
                why="the ranks would exchange tensors that do not fit, or take another rank's tokens for their own",
                fix="cut the same batch on every rank with context.split(batch)",
            )
