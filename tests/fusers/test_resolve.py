"""The data flow of a forward and the attributes of live objects: what has one value resolves, nothing is run."""

from __future__ import annotations

import enum
import functools
import json
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from fusers.attention import AttentionFuser
from fusers.base import Status, TensorRef
from fusers.members import MISSING, Unknown, read

from .sources import Config, value_of, write_call

RESOLVED = {
    "2 + 3 * 4 - 6 / 2": 11.0,
    "7 // 2 + 7 % 4": 6,
    "+self.head_dim": 16,
    "not self.is_sliding": False,
    "(1, 2) == (1, 2)": True,
    "self.layer_idx < 2 <= self.head_dim": True,
    "3 < self.layer_idx < 5": False,
    "self.layer_idx in (1, 2)": True,
    "self.config.layer_types[0] not in ['full']": False,
    "'slid' in self.config.layer_types[self.layer_idx]": True,
    "self.config.nothing is None and self.layer_idx == 1": True,
    "self.config.nothing or 5": 5,
    "self.layer_idx and 7": 7,
    "0 or self.config.nothing": None,
    "1 if self.config.layer_types else 2": 1,
    "(self.head_dim, 2)": (16, 2),
    "self.config.layer_types[-1]": "sliding",
    "{'full': 1.0, 'sliding': 2.0}[self.config.layer_types[1]]": 2.0,
    "self.config.scales.get('full')": 0.5,
    "self.config.scales.get('none', 3)": 3,
    "len(self.config.layer_types)": 2,
    "len((1, 2, 3))": 3,
    "max(self.layer_idx, 5)": 5,
    "int(2.7) + abs(-1)": 3,
    "math.pow(2, 3)": 8.0,
    "hasattr(self, 'scaling')": True,
    "hasattr(self, 'absent')": False,
    "getattr(self.config, 'head_dim', None)": 16,
    "self.sinks.shape[0]": 4,
    "self.sinks.ndim": 1,
    "self.sinks.dtype": torch.float32,
    "torch.float16": torch.float16,
    "torch.tensor(3)": 3,
    "[1, 2][1]": 2,
    "self.sinks is None": False,
    "CONSTANT": 0.125,
    "self.layers[-1].sinks.shape[0]": 4,
    "1 if self.training else 1": 1,
}


@pytest.mark.parametrize("expression", RESOLVED)
def test_expressions_with_one_value(tmp_path: Path, expression: str) -> None:
    value = value_of(tmp_path, expression)
    assert value.status is Status.RESOLVED, value.reason
    assert value.value == RESOLVED[expression]
    assert type(value.value) is type(RESOLVED[expression])


DYNAMIC = {
    "2 if self.training else 1": "changes with train",
    "1 if self.config._attn_implementation == 'eager' else 2": "what the adapter changes",
    "10 ** 10 ** 10": "too large",
    "1 / 0": "has no value",
    "(-1) ** 0.5": "not a real number",
    "2.0 ** 1e9": "has no value",
    "'a' * 3": "not arithmetic",
    "1 << 3": "not arithmetic",
    "~1": "not arithmetic",
    "-'a'": "not arithmetic",
    "1 < 'a'": "has no value",
    "[] in (1, 2)": "looks into an object",
    "1 in 'a'": "has no value",
    "1 in self.layers": "looks into an object",
    "1 in self.objects": "collection of objects",
    "self.config == 1": "compares objects",
    "self.head_dim is 16": "compares identities",
    "1 if self.sinks else 2": "used as a test",
    "1 if self.config else 2": "used as a test",
    "self.config": "is a Config, not a plain value",
    "self.absent": "no attribute 'absent'",
    "getattr(self, 'absent')": "no attribute 'absent'",
    "getattr(self, q)": "'q' is an argument",
    "getattr(self, 1)": "not a constant",
    "self.forward": "is a function",
    "undefined_name": "not defined",
    "self.config.layer_types[9]": "is not there",
    "self.layers[9].sinks": "out of range",
    "self.config.layer_types[self.config]": "looks into an object",
    "self.config.scales.get(self.config)": "is an object",
    "self.config.scales[[1]]": "looks into an object",
    "self.config.scales[(1, 2)]": "is not there",
    "{self.config: 1}['a']": "keys of a dict",
    "{**self.config.scales}['full']": "spread",
    "len(self.layers)": "length of an object",
    "len()": "length of an object",
    "max(self.config, 1)": "not a function of numbers",
    "max(1, key=abs)": "not followed",
    "max(*q)": "not followed",
    "round(1.5, 1.5)": "has no value",
    "eager(1)": "function of the model",
    "(1)(2)": "cannot be found",
    "CONSTANT(1)": "cannot be found",
    "self.sinks.grad": "only when the forward runs",
    "self.sinks.add(q)": "'q' is an argument",
    "torch.zeros(3)": "computed when",
    "torch.tensor(1.0, dtype=torch.float16)": "computed when",
    "torch.arange()": "computed when",
    "f'{q}'": "only when the forward runs",
    "self.head_dim.real": "is not followed",
    "transformers.LayoutLMv3Model": "on demand",
    "q": "argument of the forward",
    "[x for x in (1, 2)]": "only when the forward runs",
}


@pytest.mark.parametrize("expression", DYNAMIC)
@pytest.mark.filterwarnings("ignore::SyntaxWarning")
def test_expressions_without_one_value_say_why(tmp_path: Path, expression: str) -> None:
    value = value_of(tmp_path, expression, objects=[object()])
    assert value.status is Status.DYNAMIC
    assert DYNAMIC[expression] in value.reason


def test_properties_are_read_and_never_run(tmp_path: Path) -> None:
    members = """
    ran = []
    @property
    def noisy(self):
        self.ran.append(1)
        return 1.0
    @property
    def simple(self):
        "Text."
        return self.head_dim * self.other
    @property
    def other(self):
        return self.layer_idx
    @property
    def endless(self):
        return self.endless
    @property
    def bare(self):
        return
    @functools.cached_property
    def cached(self):
        return self.head_dim + 1
    native = property(len)
    """
    cls = write_call(
        tmp_path,
        "scaling=1.0, softcap=self.noisy, a=self.simple, b=self.endless, c=self.bare, d=self.cached, e=self.native",
        members=members,
    )
    module = cls()
    found = AttentionFuser().validate(module).arguments
    assert cls.ran == []  # type: ignore[attr-defined]
    assert "does more than return" in found["softcap"].reason
    assert found["a"].value == 16
    assert "too many others" in found["b"].reason
    assert "does more than return" in found["c"].reason
    assert found["d"].value == 17
    assert "is a property" in found["e"].reason


def test_a_property_whose_source_is_missing(tmp_path: Path) -> None:
    members = "made = property(functools.partial(eval, 'lambda self: 1.0')())"
    value = value_of(tmp_path, "self.made", members=members)
    assert value.status is Status.DYNAMIC
    assert "cannot be read" in value.reason


def test_attributes_that_the_forward_assigns(tmp_path: Path) -> None:
    for before in (
        "self.limit = 3",
        "self.limit *= 2",
        "setattr(self, 'limit', 2)",
        "setattr(self, q, 2)",
        "del self.limit",
    ):
        value = value_of(tmp_path, "self.limit", before, limit=1.0)
        assert value.status is Status.DYNAMIC
        assert "the forward itself assigns" in value.reason


class Kind(float, enum.Enum):
    """A number that is an enumeration's member."""

    HALF = 0.5


@pytest.mark.parametrize(
    ("attribute", "expected"),
    [
        (numpy.float64(0.5), 0.5),
        (numpy.float32(0.5), 0.5),
        (numpy.int64(3), 3),
        (Kind.HALF, 0.5),
        (torch.tensor(0.5), 0.5),
        (torch.tensor([2]), 2),
    ],
)
def test_numbers_of_other_types(tmp_path: Path, attribute: Any, expected: Any) -> None:
    value = value_of(tmp_path, "self.limit", limit=attribute)
    assert value.value == expected
    assert type(value.value) is type(expected)


def test_tensors_that_are_not_registered(tmp_path: Path) -> None:
    assert "no parameter or buffer" in value_of(tmp_path, "self.limit", limit=torch.ones(4)).reason
    registered = value_of(tmp_path, "self.limit", limit=nn.Parameter(torch.ones(())))
    assert registered.value == TensorRef("limit", (), torch.float32)


def test_parameters_of_modules_that_are_not_below_the_attention(tmp_path: Path) -> None:
    elsewhere = nn.Linear(2, 2)
    value = value_of(tmp_path, "self.holder[0].weight", holder=(elsewhere,))
    assert "no parameter or buffer of the attention" in value.reason


class Slotted:
    """An object with slots."""

    __slots__ = ("empty", "full")

    def __init__(self) -> None:
        self.full = 2


class Lazy:
    """An object that makes its attributes up."""

    def __getattr__(self, name: str) -> int:
        raise AssertionError("must not run")


class Spying:
    """An object that watches every read."""

    def __getattribute__(self, name: str) -> int:
        raise AssertionError("must not run")


class LazyModule(nn.Module):
    """A module that makes its attributes up."""

    def __getattr__(self, name: str) -> int:
        raise AssertionError("must not run")


class Holder:
    """Class attributes of several kinds."""

    plain = 3
    method = functools.lru_cache(print)


def test_reading_runs_no_code_of_the_object() -> None:
    assert read(Slotted(), "full") == 2
    assert read(Slotted(), "empty") is MISSING
    assert read(Slotted(), "absent") is MISSING
    assert read(Holder(), "plain") == 3
    assert read(Holder, "plain") == 3
    assert read(json, "absent") is MISSING
    for owner, name in ((Lazy(), "x"), (Spying(), "x"), (LazyModule(), "x"), (Holder(), "method"), (Holder, "method")):
        with pytest.raises(Unknown):
            read(owner, name)


def test_second_names_of_a_configuration() -> None:
    import transformers

    config = transformers.GPT2Config(n_embd=24)
    assert read(config, "hidden_size") == 24
    assert read(config, "n_embd") == 24
    assert read(Config(), "head_dim") == 16
