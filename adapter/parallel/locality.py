"""Proof on the live model that tokens meet in the attention interface only, so that its sequence may be cut."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..attention import Attention
from ..errors import ParallelError, SinkholdError
from ..guard import where
from .call import whole_call
from .sequence import RUN_WHOLE
from .ulysses import check_heads

LENGTH = 160
"""Tokens of the trial: mixing that shows in fewer is seen."""
_HALF = (torch.float16, torch.bfloat16)


class _OwnToken:
    """Attention in which each token sees itself only, told apart by its query, key and value."""

    def __init__(self, shares: int) -> None:
        self.shares = shares

    def attend(
        self,
        attn: Attention,
        qkv: tuple[Tensor, Tensor, Tensor],
        mask: Any,
        sink: Tensor | None,
        kwargs: dict[str, Any],
    ) -> Tensor:
        """See adapter.attention.Context."""
        call = whole_call(attn, qkv, mask, sink, kwargs)
        check_heads(call.query.shape[1], call.key.shape[1], self.shares, where(attn.owner, attn))
        group = call.query.shape[1] // call.key.shape[1]
        key, value = (t.repeat_interleave(group, dim=1) for t in (call.key, call.value))
        weight = (1 + call.query.mean(-1, keepdim=True).tanh()) * (1 + key.mean(-1, keepdim=True).tanh())
        return (value * weight).transpose(1, 2).contiguous()


def check_locality(model: nn.Module, layers: list[Attention], shares: int = 1) -> None:
    """Raise ParallelError unless every token's output depends on other tokens by attention alone, and on its position
    by its position id alone.

    Two rows run through the model with attention that sees the own token only. The second holds the same tokens with
    their position ids in another order, half of them replaced; the other half must come out alike. The first module in
    which they do not is named.

    Args:
        model: an adapted model with weights.
        layers: its Attention submodules.
        shares: parts into which the heads of each layer must divide.
    """
    if any(p.is_meta for p in model.parameters()):
        raise ParallelError(
            "the model has weights on the meta device",
            why="whether tokens meet outside its attention is tried out on the model",
            fix="load the weights first",
        )
    order, ids = _two_rows(model)
    compare = _Comparison(order)
    device = next(model.parameters()).device
    inputs: dict[str, Any] = {"input_ids": ids.to(device), "position_ids": _positions(order).to(device)}
    if "use_cache" in inspect.signature(type(model).forward).parameters:
        inputs["use_cache"] = False
    with torch.no_grad(), _trial(model, layers, compare, shares):
        try:
            output = model(**inputs)
        except SinkholdError:
            raise
        except (
            RuntimeError,
            ValueError,
            TypeError,
            IndexError,
            KeyError,
            AttributeError,
            NotImplementedError,
        ) as error:
            raise ParallelError(
                f"{LENGTH} tokens do not run: {type(error).__name__}: {error}".splitlines()[0],
                where=type(model).__name__,
                why="whether tokens meet outside its attention is tried out on the model",
                fix=RUN_WHOLE,
            ) from error
    _judge(model, output, compare)


def _judge(model: nn.Module, output: Any, compare: _Comparison) -> None:
    logits = getattr(output, "logits", None)
    if logits is not None and logits.shape[:2] != (2, LENGTH):
        raise ParallelError(
            f"logits of the shape {list(logits.shape)} for {LENGTH} tokens",
            where=type(model).__name__,
            why="an output for the whole sequence cannot be made from a part of it",
            fix=RUN_WHOLE,
        )
    if compare.differs(output):
        path, kind = compare.first or ("", type(model).__name__)
        raise ParallelError(
            "what a token becomes depends on other tokens, or on its place, outside the attention interface",
            where=f"{path} ({kind})" if path else kind,
            why="the tokens of other ranks would be missing there",
            fix=RUN_WHOLE,
        )


class _Comparison:
    """Compares the tokens that both rows have in whatever modules return; keeps the first that makes a difference."""

    def __init__(self, order: Tensor) -> None:
        self.second = torch.nonzero(order % 2 == 0)[:, 0]
        self.first_row = order[self.second]
        self.first: tuple[str, str] | None = None

    def differs(self, output: Any) -> bool:
        """Whether any tensor in `output` that has tokens differs between the rows."""
        return any(isinstance(leaf, Tensor) and self._tensor_differs(leaf) for leaf in tree_leaves(output))

    def _tensor_differs(self, tensor: Tensor) -> bool:
        if type(tensor) is not Tensor or not tensor.dim():
            return False
        if tensor.shape[0] == 2 * LENGTH:
            tensor = tensor.reshape(2, LENGTH, *tensor.shape[1:])
        if tensor.shape[:2] != (2, LENGTH):
            return False
        tolerance = 2e-2 if tensor.dtype in _HALF else 1e-3
        tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        tensor = tensor.double() if tensor.dtype == torch.float64 else tensor.float()
        one, other = tensor[0, self.first_row.to(tensor.device)], tensor[1, self.second.to(tensor.device)]
        same = (one == other) | (one - other).abs().le(tolerance * one.abs().max())
        return not bool(same.all())

    def hook(self, path: str) -> Any:
        """A forward hook for the module at `path`, which is the first when its inputs do not differ yet."""

        def look(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if self.first is None and self.differs(output) and not self.differs((args, kwargs)):
                self.first = (path, type(module).__name__)

        return look


@contextmanager
def _trial(model: nn.Module, layers: list[Attention], compare: _Comparison, shares: int) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    handles = [
        module.register_forward_hook(compare.hook(path), with_kwargs=True)
        for path, module in model.named_modules()
        if path and not isinstance(module, Attention)  # its inputs have their tokens in another place
    ]
    model.eval()
    try:
        for attn in layers:
            attn.context = _OwnToken(shares)
        yield
    finally:
        for attn in layers:
            attn.context = None
        for handle in handles:
            handle.remove()
        for module, mode in modes:
            module.training = mode


def _two_rows(model: nn.Module) -> tuple[Tensor, Tensor]:
    """An order of the tokens, and ids [2, LENGTH]: the second row in that order, the odd ones replaced."""
    generator = torch.Generator().manual_seed(0)
    config: Any = getattr(model, "config", None)
    vocabulary = min(512, config.get_text_config().vocab_size)
    first = torch.randint(vocabulary // 2, (LENGTH,), generator=generator)
    order = torch.randperm(LENGTH, generator=generator)
    second = torch.where(order % 2 == 0, first[order], first[order] + vocabulary // 2)
    return order, torch.stack([first, second])


def _positions(order: Tensor) -> Tensor:
    return torch.stack([torch.arange(LENGTH), order])
