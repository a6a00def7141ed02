"""Probe: all ranks of a tensor-parallel model give the same logits and hold the same sinks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..pipeline import stage_of
from .subject import Subject, relative
from .verification import FAIL, Probe, Skip, judge

NAME = "tensor parallel = single"


def world_size() -> int:
    """Ranks of this run; 1 without torch.distributed."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def tensor_parallel(subject: Subject) -> Probe:
    """The logits of every rank against rank 0, and the sinks put together from all shards; every rank must call it."""
    size = world_size()
    if size < 2:
        raise Skip("one process: torch.distributed is not initialised with two ranks or more")
    if stage_of(subject.model) is not None:
        raise Skip("the ranks are the stages of a pipeline, and hold different layers")
    logits = gathered(subject.own, size)
    number = max(relative(other, logits[0]) for other in logits)
    compared = 0
    for attn in subject.layers:
        if attn.sinks is None or attn._get_sink is None:
            continue
        whole = gathered(_whole(attn._get_sink(attn.owner)), size)
        if not all(torch.equal(other, whole[0]) for other in whole):
            return Probe(NAME, FAIL, number, subject.tolerance, f"the ranks hold different sinks in {attn.path}")
        compared += 1
    detail = f"{size} ranks: logits and the sinks of {compared} layers"
    return judge(NAME, number, subject.tolerance, detail)


def gathered(tensor: Tensor, size: int) -> list[Tensor]:
    """The tensor of every rank, in the order of the ranks; all must have the same shape."""
    tensor = tensor.detach().contiguous()
    found = [torch.empty_like(tensor) for _ in range(size)]
    dist.all_gather(found, tensor)
    return found


def _whole(sinks: Any) -> Tensor:
    full: Tensor = sinks.full_tensor() if hasattr(sinks, "full_tensor") else sinks
    return full
