"""Sources that are hostile, missing or not those of the running code: each is named, and none means 'no sink'."""

from __future__ import annotations

import functools
import linecache
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from fusers import source
from fusers.attention import AttentionFuser
from fusers.base import Outcome, SinkKind
from fusers.errors import SourceError
from fusers.source import forward_function, read_forward, read_function

from .sources import LOOKUP, QKV, write_call, write_class, write_module

CALL = f"{LOOKUP}\nreturn attend({QKV}, scaling=self.scaling, s_aux=self.sinks)"


def rewrite(cls: type, change: Any) -> None:
    """Edit the file of a class that is already imported."""
    path = Path(forward_function(cls).__code__.co_filename)
    path.write_text(change(path.read_text(encoding="utf-8")), encoding="utf-8", errors="surrogatepass")
    linecache.checkcache(str(path))


def refused(cls: type[nn.Module], match: str) -> SourceError:
    """The class is REFUSED, validating an instance raises the SourceError, and both say the same."""
    fuser = AttentionFuser()
    finding = fuser.match(cls)
    assert finding.outcome is Outcome.REFUSED
    with pytest.raises(SourceError, match=match) as caught:
        fuser.validate(cls())
    assert caught.value.what == finding.reason
    assert cls.__qualname__ in caught.value.where
    return caught.value


def test_line_numbers_are_those_of_the_file(tmp_path: Path) -> None:
    cls = write_class(tmp_path, CALL)
    call = AttentionFuser().match(cls).calls[0]
    assert call.file == forward_function(cls).__code__.co_filename
    assert "return attend(" in Path(call.file).read_text().splitlines()[call.line - 1]


def test_a_string_that_starts_in_column_zero_does_not_disturb(tmp_path: Path) -> None:
    text = "class Attention(nn.Module):\n    def forward(self, q):\n        text = '''\nflat\n'''\n        return q\n"
    tree = read_forward(write_module(tmp_path, "#\n" + text).Attention).tree
    assert tree.body[0].value.value == "\nflat\n"  # type: ignore[attr-defined]


def test_inherited_forward(tmp_path: Path) -> None:
    parent = write_class(tmp_path, CALL)
    child = type("Child", (parent,), {})
    finding = AttentionFuser().validate(child())
    assert finding.sink.kind is SinkKind.PER_HEAD
    assert finding.attention.cls is child


def test_decorated_forward(tmp_path: Path) -> None:
    cls = write_class(tmp_path, CALL)
    inner = forward_function(cls)

    @functools.wraps(inner)
    def outer(*args: Any, **kwargs: Any) -> Any:
        return inner(*args, **kwargs)

    cls.forward = outer  # type: ignore[method-assign]
    assert AttentionFuser().validate(cls()).sink.source == "sinks"


def test_the_attribute_of_an_instance_is_ignored(tmp_path: Path) -> None:
    module = write_class(tmp_path, CALL)()
    module.forward = lambda *args, **kwargs: None  # type: ignore[method-assign]
    assert AttentionFuser().validate(module).sink.source == "sinks"


def test_a_replaced_forward_is_read_again(tmp_path: Path) -> None:
    fuser, cls = AttentionFuser(), write_class(tmp_path, CALL)
    assert fuser.match(cls).outcome is Outcome.RESOLVED
    cls.forward = lambda self, x: x  # type: ignore[method-assign, assignment]
    assert fuser.match(cls).outcome is Outcome.NONE


@pytest.mark.parametrize(
    ("members", "match"),
    [
        ({"forward": 3}, "a int, not a Python function"),
        ({"forward": None}, "missing, not a Python function"),
        ({"forward": staticmethod(print)}, "a staticmethod"),
        ({"forward": functools.partialmethod(print)}, "partialmethod"),
    ],
)
def test_forwards_that_are_no_function(members: dict[str, Any], match: str) -> None:
    refused(type("Odd", (nn.Module,), members), match)


def test_cyclic_wrapping() -> None:
    def one() -> None: ...
    def two() -> None: ...

    one.__wrapped__, two.__wrapped__ = two, one  # type: ignore[attr-defined]
    refused(type("Cyclic", (nn.Module,), {"forward": one}), "__wrapped__ chain is a cycle")


def test_missing_file(tmp_path: Path) -> None:
    cls = write_class(tmp_path, CALL)
    Path(forward_function(cls).__code__.co_filename).unlink()
    error = refused(cls, "missing or cannot be read")
    assert "drop it in silence" in str(error)


def test_a_class_without_the_interface_needs_no_source(tmp_path: Path) -> None:
    cls = write_class(tmp_path, "return q")
    Path(forward_function(cls).__code__.co_filename).unlink()
    finding = AttentionFuser().validate(cls())
    assert finding.attention.outcome is Outcome.NONE
    assert finding.sink.kind is SinkKind.NONE


DEEP = {
    "attribute chain": ("q" + ".a" * 20_000, "too deeply|too complex|levels deep|syntax nodes"),
    "unary chain": ("-" * 3_000 + "1", "too deeply|too complex|levels deep"),
    "sum chain": ("+".join(["1"] * 3_000), "too deeply|too complex|levels deep"),
    "moderate chain": ("-" * 300 + "1", "levels deep"),
    "parentheses": ("(" * 250 + ")" * 250, "does not parse|tokens|too complex"),
    "long number": ("1" * 5_000, "does not parse"),
    "lone surrogate": ("'\ud800'", "no text|cannot be read"),
    "nul": ("'\0'", "does not parse|null"),
    "syntax": ("1 +", "does not parse|tokens"),
    "unclosed": ("(1", "does not parse|tokens"),
}


@pytest.mark.parametrize("kind", DEEP)
def test_hostile_text(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cls = write_class(tmp_path, CALL)
    text, match = DEEP[kind]
    function = forward_function(cls)
    lines = linecache.getlines(function.__code__.co_filename)
    first = function.__code__.co_firstlineno
    lines = [*lines[:first], f"        x = {text}\n", *lines[first:]]
    monkeypatch.setattr(source.linecache, "checkcache", lambda file: None)
    monkeypatch.setattr(source.linecache, "getlines", lambda file, scope: lines)
    refused(cls, match)


def test_memory_error_of_the_parser(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cls = write_class(tmp_path, CALL)

    def fail(text: str) -> None:
        raise MemoryError

    monkeypatch.setattr(source.ast, "parse", fail)
    refused(cls, "too complex for the parser")


@pytest.mark.parametrize("error", [SyntaxError("odd"), source.tokenize.TokenError("odd")])
def test_text_without_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    cls = write_class(tmp_path, CALL)

    def fail(lines: list[str]) -> None:
        raise error

    monkeypatch.setattr(source.inspect, "getblock", fail)
    refused(cls, "cannot be split into tokens")


def test_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cls = write_class(tmp_path, CALL)
    rewrite(cls, lambda text: text + "#" * source.MAX_SOURCE_BYTES)
    refused(cls, "larger than 1000000 bytes")


def test_too_many_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "MAX_NODES", 10)
    refused(write_class(tmp_path, CALL), "more than 10 syntax nodes")


EDITS = {
    "sink added": (("s_aux=self.sinks", "s_aux=self.new"), "does not mention 'sinks'"),
    "sink removed": ((", s_aux=self.sinks", ""), "does not mention 'sinks'"),
    "attribute added": (("scaling=self.scaling", "scaling=self.scaling * self.more"), "'more' is not in"),
    "float": (("x = 0.5", "x = 0.75"), "0.75 is not in the running code"),
    "arguments": (("attention_mask=None", "mask=None"), "the arguments differ"),
    "name": (("def forward", "def backward"), "defines 'backward' where 'forward' runs"),
    "no def": (("def forward(self, q, k, v, attention_mask=None, **kwargs):", "class forward:"), "is not a def"),
    "cut": (("class Attention", "#" * 10), "ends before|is not|cannot|does not|differ"),
}


@pytest.mark.parametrize("kind", EDITS)
def test_edited_after_import(tmp_path: Path, kind: str) -> None:
    cls = write_class(tmp_path, "x = 0.5\n" + CALL)
    (old, new), match = EDITS[kind]
    rewrite(cls, lambda text: text[: text.index(old)] if kind == "cut" else text.replace(old, new))
    refused(cls, match)


def test_lambda_that_calls_the_interface(tmp_path: Path) -> None:
    call = "ALL_ATTENTION_FUNCTIONS['sdpa'](self, q, q, q, None)"
    text = f"class Attention(nn.Module):\n    forward = lambda self, q: {call}"
    refused(write_module(tmp_path, text).Attention, "is not a def")


def test_every_kind_of_statement_is_found_fresh(tmp_path: Path) -> None:
    body = """
        import math as m, os.path
        from torch.nn import functional as F
        assert q is not None, "missing"
        if False:
            unused.thing
        def helper(x: "int" = 1.5) -> float:
            return -0.5 + 2.5 * x
        class Local:
            field = 1.25
        async def later(): pass
        limit: "torch.Tensor" = (0.1, 0.2)
        bare: int
        match q:
            case nn.Module(training=True):
                pass
            case {"a": 1, **rest}:
                pass
            case [first, *others]:
                pass
        self.__private = q
        if q:
            return m.sqrt(F.relu(q)), os.path, helper, Local, later
        else:
            raise ValueError(q.text)
        dead.code = 4.5
    """
    read_forward(write_class(tmp_path, body))


def test_functions_of_torch_read(tmp_path: Path) -> None:
    for cls in (nn.Linear, nn.LayerNorm, nn.Sequential, nn.MultiheadAttention, nn.Embedding, nn.Module):
        assert read_function(forward_function(cls), cls.__name__).tree.name
        assert AttentionFuser().match(cls).outcome is Outcome.NONE


def test_module_without_transformers_has_no_interface(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cls = write_call(tmp_path, "scaling=1.0")
    monkeypatch.setattr("fusers.interface._interface_class", lambda: None)
    assert AttentionFuser().match(cls).outcome is Outcome.NONE
