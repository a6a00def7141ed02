"""save_pretrained from several ranks writes the files that one process writes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from ..pipeline import stage_of


def save_as_one(model: nn.Module) -> None:
    """Let `model.save_pretrained`, called on every rank, write each tied weight once and the layers of all stages.

    transformers sees by their addresses that weights are tied, which gathered weights have lost, and writes the layers
    of the first stage of a pipeline only.
    """
    model.save_pretrained = partial(_save, model)  # type: ignore[assignment]


def _save(model: Any, save_directory: Any, *args: Any, **kwargs: Any) -> None:
    whole = kwargs.get("state_dict") is None and not kwargs.get("distributed_checkpoint")
    with _without_tied(model) if whole else nullcontext():
        if whole and stage_of(model) is not None:
            kwargs["state_dict"] = _of_all_stages(model)
        type(model).save_pretrained(model, save_directory, *args, **kwargs)


@contextmanager
def _without_tied(model: Any) -> Iterator[None]:
    """Leave weights that are tied to others out of the model's state dict."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    pairs = model.all_tied_weights_keys.items()
    tied = [name for name, source in pairs if parameters.get(name, 0) is parameters.get(source, 1)]

    def leave_out(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        for name in tied:
            state.pop(prefix + name, None)

    handle = model.register_state_dict_post_hook(leave_out)
    try:
        yield
    finally:
        handle.remove()


def _of_all_stages(model: nn.Module) -> dict[str, Tensor]:
    """On the first stage the weights of all, on the CPU; every rank must call it."""
    stage = stage_of(model)
    group = stage.pp_group
    whole: dict[str, Tensor] = {}
    own = model.state_dict()
    for source in range(stage.pp_size):
        counts = [len(own)]
        rank = dist.get_global_rank(group, source)
        dist.broadcast_object_list(counts, src=rank, group=group)
        names = list(own) if source == stage.pp_rank else [""] * counts[0]
        for name in names:
            # One by one: what travels is in memory twice.
            item = [(name, own[name].detach().cpu())] if source == stage.pp_rank else [None]
            dist.broadcast_object_list(item, src=rank, group=group)
            if stage.pp_is_first_stage and item[0] is not None:
                whole.setdefault(*item[0])
    return whole
