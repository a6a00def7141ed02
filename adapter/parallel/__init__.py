"""Attention with sinks on several devices, on the engines of torch.distributed and transformers."""

from __future__ import annotations

from ..shards import Shards, shards_of
from .agreement import Agreement, start_ranks
from .context import ContextParallel, context_parallel
from .loading import ParallelLoad, parallel_load
from .plan import Plan, derive_plan

__all__ = [
    "Agreement",
    "ContextParallel",
    "ParallelLoad",
    "Plan",
    "Shards",
    "context_parallel",
    "derive_plan",
    "parallel_load",
    "shards_of",
    "start_ranks",
]
