"""AttentionFuser: agreement between calls, its cache, and its findings for whole classes."""

from __future__ import annotations

import gc
import json
import pickle
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import nn

from fusers.attention import AttentionFuser
from fusers.base import NO_SINK, Outcome, SinkKind, Status
from fusers.errors import RefusedError, SinkholdError

from .sources import LOOKUP, QKV, write_call, write_class, write_module


def two_calls(folder: Path, first: str, second: str) -> type[nn.Module]:
    body = f"{LOOKUP}\nif q.any():\n    return attend({QKV}, {first})\nreturn attend({QKV}, {second})"
    return write_class(folder, body)


def test_calls_that_agree(tmp_path: Path) -> None:
    same = "scaling=self.scaling, s_aux=self.sinks, dropout=0.0"
    finding = AttentionFuser().validate(two_calls(tmp_path, same, same)())
    assert finding.attention.outcome is Outcome.RESOLVED
    assert len(finding.attention.calls) == 2
    assert (finding.scaling.value, finding.sink.source) == (0.25, "sinks")


def test_calls_with_different_scales(tmp_path: Path) -> None:
    finding = AttentionFuser().validate(two_calls(tmp_path, "scaling=1.0", "scaling=0.5")())
    assert finding.attention.outcome is Outcome.DYNAMIC
    assert finding.attention.reason == "the calls differ in scaling"
    assert finding.scaling.status is Status.DYNAMIC
    assert "different values: 1.0 and 0.5" in finding.scaling.reason


def test_a_sink_that_only_one_call_passes(tmp_path: Path) -> None:
    finding = AttentionFuser().validate(two_calls(tmp_path, "scaling=1.0, s_aux=self.sinks", "scaling=1.0")())
    assert finding.attention.outcome is Outcome.DYNAMIC
    assert finding.sink.kind is SinkKind.NONE
    assert not finding.sink.exact
    assert finding.arguments["s_aux"].reason == "only some of the calls pass it"


def test_different_sinks(tmp_path: Path) -> None:
    cls = two_calls(tmp_path, "scaling=1.0, s_aux=self.sinks", "scaling=1.0, s_aux=self.other_sinks")
    finding = AttentionFuser().validate(cls())
    assert "different values" in finding.arguments["s_aux"].reason
    assert finding.sink.kind is SinkKind.NONE


def test_an_argument_that_one_call_leaves_open(tmp_path: Path) -> None:
    finding = AttentionFuser().validate(two_calls(tmp_path, "scaling=1.0, softcap=2.0", "scaling=1.0, softcap=q")())
    assert "'q' is an argument" in finding.arguments["softcap"].reason


def test_arguments_of_the_call(tmp_path: Path) -> None:
    cls = write_call(tmp_path, "scaling=1.0, is_causal=False, indices=q, **kwargs")
    finding = AttentionFuser().validate(cls())
    assert finding.attention.outcome is Outcome.RESOLVED
    assert set(finding.arguments) == {"scaling", "is_causal", "indices"}
    call = finding.attention.calls[0]
    assert call.forwards_kwargs
    assert [a.name for a in call.arguments if a.positional] == ["module", "query", "key", "value", "attention_mask"]
    assert call.argument("indices") is not None
    assert call.argument("absent") is None
    assert f":{call.line})" in finding.attention.where


def test_an_unknown_keyword_is_dynamic_by_name(tmp_path: Path) -> None:
    finding = AttentionFuser().match(write_call(tmp_path, "scaling=1.0, strange=self.head_dim"))
    assert finding.outcome is Outcome.DYNAMIC
    assert finding.reason == "strange=self.head_dim: the keyword is not one that attention functions share"


def test_too_many_positional_arguments(tmp_path: Path) -> None:
    cls = write_class(tmp_path, f"{LOOKUP}\nreturn attend({QKV}, 1.0, 0.0, 3)")
    with pytest.raises(RefusedError, match="more than 7 positional arguments"):
        AttentionFuser().validate(cls())


def test_sixth_positional_argument_has_no_single_meaning(tmp_path: Path) -> None:
    cls = write_class(tmp_path, f"{LOOKUP}\nreturn attend({QKV}, 1.0, 0.0)")
    finding = AttentionFuser().validate(cls())
    assert finding.attention.outcome is Outcome.DYNAMIC
    assert finding.scaling.status is Status.DYNAMIC
    assert "differs between attention functions" in finding.scaling.reason


def test_wrappers_are_none(tmp_path: Path) -> None:
    text = """
    class Wrapper(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(2, 2)
            self.sinks = nn.Parameter(torch.zeros(4))
        def forward(self, x, **kwargs):
            return self.inner(x)
    """
    finding = AttentionFuser().validate(write_module(tmp_path, text).Wrapper())
    assert finding.attention.outcome is Outcome.NONE
    assert finding.sink is NO_SINK
    assert finding.scaling.status is Status.ABSENT
    assert finding.attention.where.startswith("written_")


def test_mentioning_the_interface_without_using_it_is_none(tmp_path: Path) -> None:
    assert AttentionFuser().match(write_class(tmp_path, "return len(ALL_ATTENTION_FUNCTIONS)")).outcome is Outcome.NONE
    body = "ALL_ATTENTION_FUNCTIONS['sdpa']\nfrom . import nothing\nx = {}['a']\nx = x\nreturn self.sink_proj(q)(k)"
    assert AttentionFuser().match(write_class(tmp_path, body)).outcome is Outcome.NONE


def test_a_table_of_the_same_name_that_is_not_the_interface(tmp_path: Path) -> None:
    text = """
    ALL_ATTENTION_FUNCTIONS = {"eager": eager}
    class Attention(nn.Module):
        def forward(self, q):
            return ALL_ATTENTION_FUNCTIONS["eager"](self, q, q, q, None, 1.0)
    """
    assert AttentionFuser().match(write_module(tmp_path, text).Attention).outcome is Outcome.NONE


def test_locals_that_name_each_other(tmp_path: Path) -> None:
    body = (
        "for i in q:\n    a = b\n    b = a\n    a = ALL_ATTENTION_FUNCTIONS['sdpa']\n    a(self, q, q, q, scaling=1.0)"
    )
    assert AttentionFuser().match(write_class(tmp_path, body)).outcome is Outcome.RESOLVED


def test_fuse_is_the_finding_and_changes_nothing(tmp_path: Path) -> None:
    module = write_call(tmp_path, "scaling=1.0, s_aux=self.sinks")()
    before = dict(module.__dict__), list(module.state_dict())
    fuser = AttentionFuser()
    assert fuser.fuse(module) == fuser.validate(module)
    assert (dict(module.__dict__), list(module.state_dict())) == before


def test_findings_hold_no_tensor(tmp_path: Path) -> None:
    module = write_call(tmp_path, "scaling=1.0, s_aux=self.sinks")()
    finding = AttentionFuser().validate(module)
    tensor = weakref.ref(module.sinks)
    del module
    gc.collect()
    assert tensor() is None
    assert finding.sink.shape == (4,)


def test_the_cache_keeps_no_class_alive(tmp_path: Path) -> None:
    text = """
    from tests.fusers.sources import Base
    def make():
        class Attention(Base):
            def forward(self, q):
                super().train
                return ALL_ATTENTION_FUNCTIONS['sdpa'](self, q, q, q, None, scaling=1.0)
        return Attention
    """
    fuser, cls = AttentionFuser(), write_module(tmp_path, text).make()
    assert fuser.match(cls).outcome is Outcome.RESOLVED
    gone = weakref.ref(cls)
    del cls
    gc.collect()
    assert gone() is None


def test_the_source_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fuser, cls = AttentionFuser(), write_call(tmp_path, "scaling=1.0")
    first = fuser.match(cls)
    monkeypatch.setattr("fusers.attention.read_function", None)
    assert fuser.match(cls) == first


def test_threads(tmp_path: Path) -> None:
    fuser = AttentionFuser()
    classes = [write_call(tmp_path, f"scaling={i}.0, s_aux=self.sinks") for i in range(8)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda i: fuser.validate(classes[i % 8]()).scaling.value, range(64)))
    assert found == [float(i % 8) for i in range(64)]


def test_subclasses_made_at_run_time(tmp_path: Path) -> None:
    cls = write_call(tmp_path, "scaling=1.0, s_aux=self.sinks")
    module = cls()
    module.__class__ = type("Sharded" + cls.__name__, (cls,), {})
    assert AttentionFuser().validate(module).sink.source == "sinks"


def test_parametrized_sinks_are_left_to_the_recording(tmp_path: Path) -> None:
    module = write_call(tmp_path, "scaling=1.0, s_aux=self.sinks")()
    torch.nn.utils.parametrize.register_parametrization(module, "sinks", nn.Tanh())
    finding = AttentionFuser().validate(module)
    assert finding.arguments["s_aux"].status is Status.DYNAMIC
    assert finding.sink.kind is SinkKind.NONE
    assert not finding.sink.exact


def test_errors_print_every_part_and_survive_pickling() -> None:
    error = RefusedError("it is so", where="here", why="because", fix="mend it")
    assert str(error).splitlines() == ["[SINK-103] it is so", "  where: here", "  why:   because", "  fix:   mend it"]
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy)) == (RefusedError, str(error))
    assert json.dumps(str(SinkholdError("bare"))) == '"[SINK-000] bare"'
