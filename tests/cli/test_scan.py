"""sinkhold scan, on a package of three classes."""

from __future__ import annotations

import json
import sys

import pytest

SOURCE = """
import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

class Sinking(nn.Module):
    def __init__(self):
        super().__init__()
        self.scaling, self.sinks = 0.5, nn.Parameter(torch.ones(2))
    def forward(self, query, key, value, mask):
        attend = ALL_ATTENTION_FUNCTIONS["eager"]
        return attend(self, query, key, value, mask, scaling=self.scaling, s_aux=self.sinks)

class Doubled(Sinking):
    def forward(self, query, key, value, mask):
        attend = ALL_ATTENTION_FUNCTIONS["eager"]
        return attend(self, query, key, value, mask, scaling=1.0, s_aux=self.sinks, sinks=self.sinks)
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    folder = tmp_path / "zoo_of_two"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "modeling_zoo.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    yield folder.name
    for name in [n for n in sys.modules if n.startswith(folder.name)]:
        del sys.modules[name]


def test_text_shows_sinks_and_refusals(sinkhold, package):
    result = sinkhold("scan", "--package", package)
    assert result.exit_code == 0
    assert result.stdout.startswith(f"{package}: 2 attention classes: 1 resolved, 1 refused\n")
    assert "with a sink (1)" in result.stdout
    assert "Sinking [resolved]" in result.stdout
    assert "sink   s_aux=self.sinks" in result.stdout
    assert "why    the call passes two sinks" in result.stdout
    assert result.stderr == ""


def test_json_has_every_class(sinkhold, package):
    rows = json.loads(sinkhold("scan", "--json", "--package", package).stdout)
    assert [(row["cls"], row["outcome"]) for row in rows] == [("Sinking", "resolved"), ("Doubled", "refused")]


def test_unknown_package_is_a_usage_error(sinkhold):
    for name in ("no_such_package_here", "transformers.no_such"):
        result = sinkhold("scan", "--package", name)
        assert result.exit_code == 2
        assert f"there is no package '{name}'" in result.stderr
