"""One stage of transformers' pipeline, which holds some of a model's layers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn
from transformers import Cache


def stage_of(model: nn.Module) -> Any:
    """What transformers notes on a model that is one stage of a pipeline; None on any other."""
    return getattr(model, "_pp_stage", None)


def count_own_layers(model: nn.Module) -> Callable[[], None]:
    """Let a stage count the cached tokens in layers that it holds, from its next forward on.

    transformers asks the first cache layer of each kind for the sizes of the masks and for the position; on a later
    stage nothing ever comes into that one.

    Args:
        model: one stage of a pipeline.

    Returns:
        What undoes it.
    """
    stage = stage_of(model)
    base: Any = getattr(model, str(model.base_model_prefix))
    own = range(*stage.layer_range_for_rank(stage.pp_rank, len(base.layers)))

    def prepare(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # transformers 5.24 renamed the argument
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        if isinstance(cache, Cache) and "get_mask_sizes" not in vars(cache):
            cache.get_seq_length = partial(_seq_length, cache, own)
            cache.get_mask_sizes = partial(_mask_sizes, cache, own)

    remove: Callable[[], None] = base.register_forward_pre_hook(prepare, with_kwargs=True).remove
    return remove


def _seq_length(cache: Cache, own: range, layer_idx: int = 0) -> Any:
    return type(cache).get_seq_length(cache, _counted(cache, own, layer_idx))


def _mask_sizes(cache: Cache, own: range, query_length: int, layer_idx: int) -> Any:
    return type(cache).get_mask_sizes(cache, query_length, _counted(cache, own, layer_idx))


def _counted(cache: Cache, own: range, index: int) -> int:
    """The layer itself where the stage holds it, else the first that it holds, of the same kind if there is one."""
    held = [i for i in own if i < len(cache.layers)]
    if index in own or not held:
        return index
    kind = type(cache.layers[index])
    return next((i for i in held if type(cache.layers[i]) is kind), held[0])
