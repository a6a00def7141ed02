"""A batch cut along its sequence, one piece for each rank, and pieces put together again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ..errors import ParallelError

IGNORED = -100
"""The label that a loss of transformers leaves out."""
_WHY = "a rank would see another part of it than of the tokens"


def split_batch(batch: Mapping[str, Any], rank: int, size: int, *, shifts_labels: bool) -> dict[str, Any]:
    """The part of a batch that belongs to one rank.

    Args:
        batch: the whole batch, the same on every rank: `input_ids` or `inputs_embeds` [batch, length, ...], and
            whatever else the model takes with its tokens along dimension 1 (`labels`, `position_ids`, a 2D
            `attention_mask`). Scalars and what is no tensor stay as they are.
        rank, size: which of how many parts.
        shifts_labels: the model's loss compares each token with the label after it. Then `shift_labels` and
            `num_items_in_batch` are added, by which the losses of all ranks sum to that of one process.

    Returns:
        The part, with `position_ids` in any case. A length that does not divide is padded on the right: with tokens
        of another document, or with masked ones where the batch has an `attention_mask`.

    Raises:
        ParallelError: a tensor has no tokens along dimension 1.
    """
    tokens = batch["input_ids"] if batch.get("input_ids") is not None else batch.get("inputs_embeds")
    if not isinstance(tokens, Tensor) or tokens.dim() < 2:
        raise ParallelError("the batch has neither input_ids nor inputs_embeds", why=_WHY, fix="pass one of the two")
    length = tokens.shape[1]
    whole = dict(batch)
    if whole.get("position_ids") is None:
        whole["position_ids"] = torch.arange(length, device=tokens.device)[None].expand(tokens.shape[0], -1)
    if shifts_labels and whole.get("labels") is not None:
        if whole.get("shift_labels") is None:
            whole["shift_labels"] = F.pad(whole["labels"], (0, 1), value=IGNORED)[:, 1:]
        if whole.get("num_items_in_batch") is None:
            whole["num_items_in_batch"] = (whole["shift_labels"] != IGNORED).sum()
    return {name: _part(name, value, length, rank, size) for name, value in whole.items()}


def _part(name: str, value: Any, length: int, rank: int, size: int) -> Any:
    if not isinstance(value, Tensor) or value.dim() == 0:
        return value
    if value.dim() < 2 or value.shape[1] != length or (name == "attention_mask" and value.dim() != 2):
        raise ParallelError(
            f"{name} has the shape {list(value.shape)} and cannot be cut with {length} tokens along dimension 1",
            why=_WHY,
            fix="pass [batch, length] tensors; padding as a 2D attention_mask, documents as position_ids that restart",
        )
    piece = -(-length // size)
    value = torch.cat([value, _padding(name, value, piece * size - length)], dim=1)
    return value[:, rank * piece : (rank + 1) * piece].contiguous()


def _padding(name: str, value: Tensor, count: int) -> Tensor:
    shape = (value.shape[0], count, *value.shape[2:])
    if name == "position_ids":
        # Positions that start again make another document of the padding, which no real token sees.
        return torch.arange(count, device=value.device, dtype=value.dtype)[None].expand(shape)
    return value.new_full(shape, IGNORED if name in ("labels", "shift_labels") else 0)


def gather_tokens(tensor: Tensor, group: dist.ProcessGroup, dim: int = 1, length: int | None = None) -> Tensor:
    """The pieces of all ranks side by side along `dim`, cut to `length`, without gradient; the same on every rank."""
    pieces = gather(tensor, group)
    whole = torch.cat(pieces, dim=dim)
    return whole if length is None else whole.narrow(dim, 0, length)


def gather(tensor: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """The tensor of every rank, in the order of the ranks; all must have the same shape."""
    tensor = tensor.detach().contiguous()
    found = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, tensor, group=group)
    return found
