"""What a checkpoint that passed its checks holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from adapter.checkpoint.header import StoredTensor


class Form(str, Enum):
    """How the weights are stored."""

    SAFETENSORS = "safetensors"
    PICKLE = "pickle"
    DISTRIBUTED = "distributed"
    """safetensors files, one per rank, each with its slice of a tensor"""


@dataclass(frozen=True)
class CheckpointSummary:
    """A checkpoint's files as they will be loaded.

    `tensors` maps every key to its place; `files` are in loading order; `sinks` are those of the keys whose name
    speaks of a sink, under the names on disk. `notes` are oddities that change nothing.
    """

    folder: Path
    form: Form
    files: tuple[Path, ...]
    tensors: Mapping[str, StoredTensor] = field(repr=False)
    sinks: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())
