"""Tiny-random checkpoints for `demo` and `selftest`, from configurations kept as data in demo_models.json."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from ..auto import sink_names

_DATA = Path(__file__).with_name("demo_models.json")


@dataclass(frozen=True)
class Tiny:
    """One entry of the data: a title, and the names of a config class and an Auto class of transformers."""

    title: str
    config: str
    auto: str
    fields: dict[str, Any]

    @property
    def installed(self) -> bool:
        """Whether the installed transformers has this model."""
        return hasattr(transformers, self.config)


def entries() -> list[Tiny]:
    """All entries, in the order of the file."""
    data = json.loads(_DATA.read_text(encoding="utf-8"))
    return [Tiny(m["title"], m["config"], m["auto"], {**data["common"], **m["fields"]}) for m in data["models"]]


def write(tiny: Tiny, folder: Path, seed: int = 0) -> None:
    """Write a checkpoint with random weights, and sinks of +2 and more so that dropping them shows."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = getattr(transformers, tiny.config)(**tiny.fields)
        model: nn.Module = getattr(transformers, tiny.auto).from_config(config, attn_implementation="eager")
        for name in sorted(sink_names(model)):
            sink = model.get_parameter(name)
            sink.data.copy_((3 + 0.5 * torch.randn(sink.shape)).clamp(min=2))
    model.save_pretrained(folder)  # type: ignore[operator]


def drop_sinks(model: nn.Module) -> int:
    """Set every sink to -inf, which is what an attention that ignores it computes. Returns the number of sinks."""
    names = sink_names(model)
    for name in names:
        model.get_parameter(name).data.fill_(float("-inf"))
    return len(names)
