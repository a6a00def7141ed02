"""The scan of every attention class of the installed transformers against a frozen classification."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections import Counter
from pathlib import Path

import pytest
import transformers

from fusers.base import Outcome
from fusers.scan import ScanRow, scan_modules

VERSION = ".".join(transformers.__version__.split(".")[:2])
GOLDEN = Path(__file__).with_name(f"golden_{VERSION}.json")
CLASSES = {"5.25": 468, "5.24": 461, "5.17": 413}

golden_only = pytest.mark.skipif(
    not GOLDEN.exists(),
    reason=f"no frozen classification of transformers {VERSION}; there is one for {', '.join(CLASSES)}",
)


@pytest.fixture(scope="module")
def rows() -> list[ScanRow]:
    return list(scan_modules())


def classified(rows: list[ScanRow]) -> dict[str, list[str]]:
    """Class -> outcome, scaling and sink expressions."""
    return {f"{r.module}.{r.cls}": [r.outcome.value, " | ".join(r.scaling), " | ".join(r.sink)] for r in rows}


@pytest.mark.slow
def test_every_class_has_a_definite_outcome(rows: list[ScanRow]) -> None:
    assert len(rows) > 400
    assert len(classified(rows)) == len(rows)
    for row in rows:
        assert row.outcome is not Outcome.NONE
        assert row.reason
        assert row.outcome is Outcome.REFUSED or row.calls
    assert json.loads(json.dumps([dataclasses.asdict(row) for row in rows]))[0]["module"] == rows[0].module


@golden_only
@pytest.mark.slow
def test_frozen_classification(rows: list[ScanRow]) -> None:
    assert len(rows) == CLASSES[VERSION]
    expected = json.loads(GOLDEN.read_text())
    found = classified(rows)
    assert {c: found.get(c) for c in expected.keys() | found.keys() if found.get(c) != expected.get(c)} == {}
    assert list(found) == list(expected)


@golden_only
def test_the_frozen_classification_holds_the_known_counts() -> None:
    golden = json.loads(GOLDEN.read_text())
    sinks = Counter(sink for _, _, sink in golden.values() if sink)
    assert sinks["s_aux=self.sinks"] == (7 if VERSION == "5.17" else 9)
    assert {o for o, _, _ in golden.values()} <= {"resolved", "dynamic", "refused"}
    filters = [entry for name, entry in golden.items() if name.endswith(".OpenAIPrivacyFilterAttention")]
    assert all(entry[1] == "1.0" for entry in filters)


def make_package(folder: Path, name: str, files: dict[str, str]) -> None:
    """A package of models: `files` maps a model's name to its module's text."""
    for model, text in files.items():
        (folder / name / model).mkdir(parents=True)
        (folder / name / model / "__init__.py").touch()
        (folder / name / model / f"modeling_{model}.py").write_text(text)
    (folder / name / "__init__.py").touch()


GOOD = """
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
class Second(nn.Module):
    def forward(self, q):
        f = ALL_ATTENTION_FUNCTIONS["sdpa"]
        f(self, q, q, q, None, scaling=1.0, is_causal=True)
        return f(self, q, q, q, None, scaling=0.5, s_aux=self.sinks)
class Inherits(Second):
    pass
class Plain(nn.Module):
    def forward(self, q):
        return q
class Bad(nn.Module):
    def forward(self, q):
        return ALL_ATTENTION_FUNCTIONS["sdpa"](self, q, q, q, None, scaling=0.5, sink_bias=q)
class Odd(nn.Module):
    forward = 3
def forward(self, q):
    return ALL_ATTENTION_FUNCTIONS["sdpa"](self, q, q, q, None, scaling=0.5)
"""


def test_scan_of_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = "import no_such_module_at_all  # AttentionInterface\n"
    leaving = "raise RuntimeError('no')  # ALL_ATTENTION_FUNCTIONS\n"
    unrelated = "raise RuntimeError('must not be imported')\n"
    files = {"good": GOOD, "broken": broken, "leaving": leaving, "unrelated": unrelated}
    make_package(tmp_path, "scanned_models", files)
    monkeypatch.syspath_prepend(str(tmp_path))
    rows = list(scan_modules("scanned_models"))
    for name in [name for name in sys.modules if name.startswith("scanned_models")]:
        monkeypatch.delitem(sys.modules, name)
    assert [(r.module.rpartition("_")[2], r.cls, r.outcome.value) for r in rows] == [
        ("broken", "", "refused"),
        ("good", "Odd", "refused"),
        ("good", "Second", "dynamic"),
        ("good", "Bad", "refused"),
        ("leaving", "", "refused"),
    ]
    assert (
        rows[0].reason == "the module cannot be imported: ModuleNotFoundError: No module named 'no_such_module_at_all'"
    )
    second = rows[2]
    assert (second.line, second.calls) == (7, 2)
    assert (second.scaling, second.sink, second.keywords) == (("1.0", "0.5"), ("s_aux=self.sinks",), ("is_causal",))
    assert rows[4].reason.endswith("RuntimeError: no")


def test_scan_of_a_package_that_is_not_there() -> None:
    assert list(scan_modules("no_such_package_at_all")) == []
