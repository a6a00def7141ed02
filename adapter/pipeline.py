"""One stage of transformers' pipeline, which holds some of a model's layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import Cache, PreTrainedModel

from .errors import ParallelError

_TOKENS = 3
_UNNAMED = "kwargs"
_OTHER_WAYS = 'split it by tensor parallelism (tp_plan="auto"), or place it with device_map'


def stage_of(model: nn.Module) -> Any:
    """What transformers notes on a model that is one stage of a pipeline; None on any other."""
    return getattr(model, "_pp_stage", None)


def check_stages(model: PreTrainedModel) -> None:
    """Raise ParallelError for a model that transformers' pipeline does not know how to give to several stages."""
    base = getattr(model, str(model.base_model_prefix), None)
    if not isinstance(getattr(base, "layers", None), nn.ModuleList):
        lacking = f"{type(base).__name__} has no list of layers named 'layers'"
    elif not model.can_generate():
        lacking = f"{type(model).__name__} is no causal language model"
    else:
        return
    raise ParallelError(
        f"transformers' pipeline cannot split this model: {lacking}",
        why="it deals out the layers of a causal language model and hands on its logits, nothing else",
        fix=_OTHER_WAYS,
    )


def run_as_stage(model: nn.Module) -> Callable[[], None]:
    """Let a stage use every keyword as the whole model does, and count the cached tokens in layers that it holds.

    transformers hands keywords that a model's forward does not name (`past_key_values` since 5.24) to the layers as one
    dict, where nobody looks; and it asks the first cache layer of each kind for the sizes of the masks and for the
    position, into which nothing ever comes on a later stage.

    Args:
        model: one stage of a pipeline.

    Returns:
        What undoes it.

    Raises:
        ParallelError: the model cannot be cut between its layers as transformers cuts it.
    """
    stage = stage_of(model)
    base: Any = getattr(model, str(model.base_model_prefix))
    _check_cut(base, stage)
    own = range(*stage.layer_range_for_rank(stage.pp_rank, len(base.layers)))

    def prepare(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if isinstance(kwargs.get(_UNNAMED), dict):
            given = {**kwargs, **kwargs[_UNNAMED]}
            # The pipeline fills in None for all that was not given, and a new name beats the old one of an argument.
            kwargs = {name: value for name, value in given.items() if name != _UNNAMED and value is not None}
        caches = [value for value in kwargs.values() if isinstance(value, Cache)]
        for cache in caches:
            if "get_mask_sizes" not in vars(cache):
                cache.get_seq_length = partial(_seq_length, cache, own)
                cache.get_mask_sizes = partial(_mask_sizes, cache, own)
        return args, kwargs

    remove: Callable[[], None] = base.register_forward_pre_hook(prepare, with_kwargs=True).remove
    return remove


def _check_cut(base: Any, stage: Any) -> None:
    """Raise ParallelError unless a stage without its layers hands on what it is given.

    A later stage gets hidden states as `inputs_embeds`. What a model does to these before its first layer, or after its
    last one, every stage would do again.
    """
    parameter = next(base.parameters())
    if parameter.is_meta:
        return
    given = torch.linspace(-1, 1, _TOKENS * base.config.hidden_size, device=parameter.device).to(parameter.dtype)
    given = given.view(1, _TOKENS, -1)
    try:
        with _without_layers(base), torch.no_grad():
            handed_on = base(inputs_embeds=given, use_cache=False).last_hidden_state
        said = "what stands before and after its layers changes the hidden states"
    except Exception as error:  # noqa: BLE001 - whatever a model's own code raises says that it cannot run so
        handed_on, said = None, f"{type(error).__name__}: {error}"
    if handed_on is None or handed_on.shape != given.shape or not torch.allclose(handed_on, given):
        raise ParallelError(
            f"{type(base).__name__} cannot be cut between its layers: {said}",
            why="transformers' pipeline hands hidden states on as if they were embeddings; every stage would apply "
            "that again, and the logits would be wrong without an error",
            fix=_OTHER_WAYS,
        )


@contextmanager
def _without_layers(base: Any) -> Iterator[None]:
    from transformers.distributed.pipeline_parallel import PipelineIdentityLayer

    layers, norm = list(base.layers), base.norm
    try:
        for index in range(len(layers)):
            base.layers[index] = PipelineIdentityLayer()
        base.norm = PipelineIdentityLayer()
        yield
    finally:
        for index, layer in enumerate(layers):
            base.layers[index] = layer
        base.norm = norm


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
