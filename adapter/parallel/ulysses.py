"""Head-scattering (Ulysses) attention: the ranks trade their parts of the sequence for parts of the heads and back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..backends.call import Attended, AttentionCall
from ..errors import ParallelError


def attend(
    call: AttentionCall, group: dist.ProcessGroup, run: Callable[[AttentionCall], Attended], where: str = ""
) -> Tensor:
    """Attention of this rank's queries to the keys of all ranks; every rank of the group must call it.

    Each rank attends over the whole sequence with its share of the heads and of the sinks. Key-value heads that are
    fewer than the ranks are sent to each rank whose query heads share them.

    Args:
        call: query, key and value of this rank, [batch, heads, length, head_dim], all ranks' lengths equal; its
            visibility is that of these queries over the keys of all ranks, in the order of the ranks. Sinks are
            [num_heads] or None.
        group: the ranks.
        run: the attention over the whole sequence.
        where: for the error.

    Returns:
        Output [batch, length, num_heads, v_head_dim]. After backward each rank holds the sink's gradient of its heads
        and zero for the others: the sum over the ranks is that of one rank.

    Raises:
        ParallelError: the heads do not divide; the sizes that work are named.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    batch, num_heads, length, _ = call.query.shape
    check_heads(num_heads, call.key.shape[1], size, where)
    copies = max(1, size // call.key.shape[1])
    key, value = (t.repeat_interleave(copies, dim=1) if copies > 1 else t for t in (call.key, call.value))
    query, key, value = _exchanged((call.query, key, value), group, size)
    heads = num_heads // size
    visibility = call.visibility
    whole = replace(
        call,
        query=query,
        key=key,
        value=value,
        visibility=visibility.with_(q_length=visibility.kv_length, q_offset=0, query_documents=None),
        sinks=None if call.sinks is None else call.sinks[rank * heads : (rank + 1) * heads],
    )
    output = run(whole).output.reshape(batch, size, length, heads, -1).transpose(0, 1)
    back: Tensor = _Exchange.apply(output.flatten(1), group)  # type: ignore[no-untyped-call]
    return back.view(size, batch, length, heads, -1).permute(1, 2, 0, 3, 4).flatten(2, 3)


def check_heads(num_heads: int, num_kv_heads: int, size: int, where: str = "") -> None:
    """Raise ParallelError unless the heads can be dealt out to `size` ranks."""

    def divides(ranks: int) -> bool:
        return num_heads % ranks == 0 and (num_kv_heads % ranks == 0 or ranks % num_kv_heads == 0)

    if divides(size):
        return
    works = ", ".join(str(n) for n in range(1, num_heads + 1) if divides(n))
    raise ParallelError(
        f"{num_heads} query heads and {num_kv_heads} key-value heads cannot be dealt out to {size} ranks",
        where=where,
        why="a rank would hold a part of a head, or query heads of two groups",
        fix=f'use one of these sizes: {works}; or method="ring", which takes any size',
    )


def _exchanged(tensors: tuple[Tensor, ...], group: dist.ProcessGroup, size: int) -> list[Tensor]:
    """[batch, heads, length, head_dim] -> [batch, heads / size, size * length, head_dim], in one exchange for all."""
    parts = [t.reshape(t.shape[0], size, -1, *t.shape[2:]).transpose(0, 1) for t in tensors]
    sent = torch.cat([part.flatten(1) for part in parts], dim=1)
    received: Tensor = _Exchange.apply(sent, group)  # type: ignore[no-untyped-call]
    found = torch.split(received, [part[0].numel() for part in parts], dim=1)
    pairs = zip(found, parts, strict=True)
    return [piece.reshape(part.shape).permute(1, 2, 0, 3, 4).flatten(2, 3) for piece, part in pairs]


class _Exchange(torch.autograd.Function):
    """Row i of [size, n] goes to rank i; the gradients go the same way back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_to_all(rows, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _all_to_all(grads[0], ctx.group), None


def _all_to_all(rows: Tensor, group: dist.ProcessGroup) -> Tensor:
    received = torch.empty_like(rows, memory_format=torch.contiguous_format)
    dist.all_to_all_single(received, rows.contiguous(), group=group)
    return received
