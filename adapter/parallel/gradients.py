"""The sum of gradients over the ranks that share a sequence."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..errors import ParallelError


def sum_gradients(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Replace each gradient by its sum over the ranks; one that no rank has stays None.

    Args:
        parameters: the same ones in the same order on every rank.
        group: the ranks; all must call it.

    Raises:
        ParallelError: a parameter is spread over these very ranks: what spreads it reduces its gradients too.
    """
    trained = [p for p in parameters if p.requires_grad]
    for parameter in trained:
        _check_apart(parameter, group)
    if not trained:
        return
    present = torch.tensor([p.grad is not None for p in trained], dtype=torch.int32, device=trained[0].device)
    dist.all_reduce(present, group=group)
    for parameter, ranks in zip(trained, present.tolist(), strict=True):
        if not ranks:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(_local(parameter.grad), group=group)


def _local(gradient: Tensor) -> Tensor:
    to_local = getattr(gradient, "to_local", None)
    return to_local() if to_local is not None else gradient


def _check_apart(parameter: nn.Parameter, group: dist.ProcessGroup) -> None:
    mesh = getattr(parameter, "device_mesh", None)
    if mesh is None:
        return
    ranks = set(dist.get_process_group_ranks(group))
    shared = [d for d in range(mesh.ndim) if len(ranks & set(dist.get_process_group_ranks(mesh.get_group(d)))) > 1]
    if shared:
        raise ParallelError(
            "a parameter is spread over the ranks of the context",
            where=f"mesh dimensions {shared} of a parameter of the shape {list(parameter.shape)}",
            why="what spreads it has reduced its gradients already; a second sum would add different shards",
            fix="leave reduce_gradients out, and multiply the loss by the number of ranks where gradients are averaged",
        )
