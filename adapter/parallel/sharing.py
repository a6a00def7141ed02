"""One all-reduce in the backward for all column-wise projections of the same input, instead of one for each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from .plan import generic

_COLUMN_WISE = "colwise"


class SharedInput:
    """The input of sibling projections as one replicated DTensor.

    Each column-wise projection turns its input into a DTensor, whose gradient is summed over the ranks. Given the same
    DTensor, their gradients add up on the rank first and are summed over the ranks once (arXiv 1909.08053, section 3:
    one all-reduce for each of the two blocks of a layer, in each direction).
    """

    def __init__(self) -> None:
        self._given: Tensor | None = None
        self._shared: DTensor | None = None

    def share(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Forward pre-hook of a projection; without a backward to come it changes nothing."""
        weight: Any = module._parameters.get("weight")
        given: Any = args[0] if args else None
        if (
            not isinstance(given, Tensor)
            or isinstance(given, DTensor)
            or not (torch.is_grad_enabled() and given.requires_grad)
            or not isinstance(weight, DTensor)
            or weight.device_mesh.ndim != 1
        ):
            return args
        if given is not self._given:
            self._given = given
            self._shared = DTensor.from_local(given, weight.device_mesh, [Replicate()], run_check=False)
        return (self._shared, *args[1:])

    def clear(self, *_: Any) -> None:
        """Forward hook of the module around them: what is kept here would keep the graph."""
        self._given = self._shared = None


def share_inputs(model: nn.Module, plan: dict[str, str]) -> None:
    """Let the column-wise linears below the same module share their inputs.

    Args:
        model: loaded with tensor parallelism.
        plan: name in the model, layer numbers as `*` -> style.
    """
    for path, parent in model.named_modules():
        siblings = [
            child for name, child in parent.named_children() if type(child) is nn.Linear and _is_split(path, name, plan)
        ]
        if len(siblings) > 1:
            shared = SharedInput()
            for linear in siblings:
                linear.register_forward_pre_hook(shared.share)
            parent.register_forward_hook(shared.clear, always_call=True)


def _is_split(path: str, name: str, plan: dict[str, str]) -> bool:
    return plan.get(generic(f"{path}.{name}" if path else name)) == _COLUMN_WISE
