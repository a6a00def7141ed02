"""The one style that transformers lacks: key-value heads on more ranks than there are heads."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

_WHOLE = frozenset({"replicate", "replicated_with_grad_allreduce", "local_params", "mla_kv_a_proj", "all_reduce"})
_PREFIX = "sinkhold_kv_heads_of_"


def shards(style: str | None) -> bool:
    """Whether a style splits the parameters it is given to."""
    return style is not None and style not in _WHOLE


def kv_style(head_dim: int) -> str:
    """The name of the style that gives each rank the key-value heads of its own query heads; registered on demand.

    Where the heads divide by the ranks it is `colwise`. Where the ranks divide by the heads, each rank holds the whole
    projection and uses the one head that its query heads share.

    Args:
        head_dim: rows of one head in the projection.
    """
    from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES

    name = f"{_PREFIX}{head_dim}"
    if name not in ALL_PARALLEL_STYLES:
        ALL_PARALLEL_STYLES.register(name, _kv_heads(head_dim))
    return name


def is_kv_style(style: str) -> bool:
    """Whether `style` is one that `kv_style` names."""
    return style.startswith(_PREFIX)


def _kv_heads(head_dim: int) -> Any:
    from transformers.distributed.tensor_parallel import ColwiseParallel

    class KvHeads(ColwiseParallel):  # type: ignore[misc]
        """Key or value projection by heads; see `kv_style`."""

        # transformers 5.25 passes the config and the meshes too.
        def shard_param(self, module: nn.Module, param: str, mesh: Any, **rest: Any) -> None:
            if _heads(module, head_dim) % mesh.size() == 0:
                super().shard_param(module, param, mesh, **rest)

        def install_forward(self, module: nn.Module, mesh: Any, **rest: Any) -> nn.Module:
            heads = _heads(module, head_dim)
            if heads % mesh.size() == 0:
                installed: nn.Module = super().install_forward(module, mesh, **rest)
                return installed
            start = mesh.get_local_rank() * heads // mesh.size() * head_dim
            module.forward = _one_head(module.forward, mesh.get_group(), start, head_dim)
            return module

    return KvHeads()


def _heads(module: nn.Module, head_dim: int) -> int:
    features: int = module.out_features  # type: ignore[assignment]
    return features // head_dim


def _one_head(forward: Any, group: dist.ProcessGroup, start: int, head_dim: int) -> Any:
    def one_head(hidden_states: Tensor) -> Tensor:
        return _SumBackward.apply(forward(hidden_states), group).narrow(-1, start, head_dim)  # type: ignore[no-any-return, no-untyped-call]

    return one_head


class _SumBackward(torch.autograd.Function):
    """Identity forward; backward sums over the ranks, which each hold the gradient of their own query heads only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        grad = grads[0].contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None
