"""Attention classes written to a file and imported, so that the fuser reads them as it reads a model's."""

from __future__ import annotations

import importlib.util
import itertools
import sys
import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from fusers.attention import AttentionFuser
from fusers.base import Value

HEAD = """
import functools
import math
import torch
import transformers.modeling_utils
import transformers.modeling_utils as utils
from functools import partial
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as TABLE

CONSTANT = 0.125
def eager(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
    return query, None
"""

LOOKUP = "attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager)"
QKV = "self, q, k, v, attention_mask"

_count = itertools.count()


class Config:
    """The configuration of a written attention."""

    def __init__(self) -> None:
        self._attn_implementation = "eager"
        self.attention_multiplier = 0.5
        self.layer_types = ["full", "sliding"]
        self.scales = {"full": 0.5, "sliding": 0.25}
        self.head_dim = 16
        self.nothing = None


class Base(nn.Module):
    """What the written forwards may read."""

    def __init__(self) -> None:
        super().__init__()
        self.config = Config()
        self.scaling, self.head_dim, self.layer_idx, self.is_sliding = 0.25, 16, 1, True
        self.sinks = nn.Parameter(torch.full((4,), 2.0))
        self.other_sinks = nn.Parameter(torch.full((4,), 3.0))
        self.register_buffer("buffered", torch.full((4,), 2.0))
        self.sink_proj = nn.Linear(8, 4)
        self.register_parameter("no_sinks", None)
        self.sub = nn.Module()
        self.sub.sinks = nn.Parameter(torch.full((4,), 2.0))
        self.layers = nn.ModuleList([nn.Module(), nn.Module()])
        self.layers[1].sinks = nn.Parameter(torch.full((4,), 2.0))
        self.table = nn.Parameter(torch.full((2, 4), 2.0))


def write_module(folder: Path, text: str) -> ModuleType:
    """Write `text` after HEAD and import it as a fresh module."""
    name = f"written_{next(_count)}"
    path = folder / f"{name}.py"
    path.write_text(HEAD + textwrap.dedent(text), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def write_class(folder: Path, body: str, members: str = "", arguments: str = "") -> type[nn.Module]:
    """A class whose forward has `body`; `members` are more members of the class."""
    text = [
        "from tests.fusers.sources import Base",
        "class Attention(Base):",
        textwrap.indent(textwrap.dedent(members), "    "),
        f"    def forward(self, q, k, v, attention_mask=None, {arguments}**kwargs):",
        textwrap.indent(textwrap.dedent(body), "        "),
    ]
    found: Any = write_module(folder, "\n".join(text)).Attention
    return found  # type: ignore[no-any-return]


def write_call(folder: Path, keywords: str, before: str = "pass", members: str = "") -> type[nn.Module]:
    """A class with one ordinary call of the interface that passes `keywords`."""
    return write_class(folder, f"{before}\n{LOOKUP}\nreturn attend({QKV}, {keywords})", members)


def value_of(folder: Path, expression: str, before: str = "pass", members: str = "", **attributes: Any) -> Value:
    """The value of `expression` passed as a keyword, on an instance that also has `attributes`."""
    module = write_call(folder, f"scaling=1.0, softcap={expression}", before, members)()
    for name, attribute in attributes.items():
        setattr(module, name, attribute)
    return AttentionFuser().validate(module).arguments["softcap"]
