"""Runs the same thing under transformers' eager attention and under the adapter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache

import adapter

Run = Callable[[Any], Tensor]


def under_eager(model: Any, run: Run) -> Tensor:
    """`run(model)` with transformers' own eager attention."""
    model.set_attn_implementation("eager")
    with torch.no_grad():
        return run(model)


def under_adapter(model: Any, run: Run, backend: str = "auto") -> Tensor:
    """`run(model)` through the adapter; the model is restored afterwards."""
    with adapter.adapted(model, backend), torch.no_grad():
        return run(model)


def relative(ours: Tensor, theirs: Tensor) -> float:
    """Greatest difference over the greatest value: the error in units of the logits' scale."""
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


def logits(model: Any, **inputs: Any) -> Tensor:
    """The logits of one forward without a cache."""
    if getattr(model.config.get_text_config(), "use_cache", None) is not None:
        inputs.setdefault("use_cache", False)
    return model(**inputs).logits


def decode(
    model: Any, ids: Tensor, steps: int, cache: Any, mask: Tensor | None = None, chunk: int | None = None
) -> Tensor:
    """[batch, prompt + steps, vocabulary] logits of a prefill (in chunks) and of `steps` tokens fed one by one."""
    prompt = ids.shape[1] - steps
    sizes = [chunk] * (prompt // chunk) + [prompt % chunk] * bool(prompt % chunk) if chunk else [prompt]
    collected, start = [], 0
    positions = mask.long().cumsum(-1).sub(1).clamp(min=0) if mask is not None else None
    for size in sizes + [1] * steps:
        end = start + size
        extra = {"attention_mask": mask[:, :end], "position_ids": positions[:, start:end]} if mask is not None else {}
        collected.append(model(input_ids=ids[:, start:end], past_key_values=cache, use_cache=True, **extra).logits)
        start = end
    return torch.cat(collected, dim=1)


def new_cache(model: Any, kind: str, length: int) -> Any:
    """An empty cache of the model, 'dynamic' or 'static'."""
    if kind == "static":
        return StaticCache(config=model.config.get_text_config(), max_cache_len=length)
    return DynamicCache(config=model.config.get_text_config())
