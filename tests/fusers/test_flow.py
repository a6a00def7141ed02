"""Which assignment of a local reaches the call, and where none can be told to."""

from __future__ import annotations

from pathlib import Path

import pytest

from fusers.attention import AttentionFuser
from fusers.base import Status, Value

from .sources import value_of, write_class, write_module

FLOWS = {
    "renamed": ("a = self.scaling\nx = a", 0.25),
    "annotated": ("x: float = 3.0", 3.0),
    "chained": ("x = y = 3.0", 3.0),
    "unpacked": ("(x, y), z = (1, 2), 3", 1),
    "again": ("x = 1\nx = x + 1", 2),
    "augmented": ("x = 2\nx *= self.head_dim", 32),
    "if": ("x = 1\nif self.is_sliding:\n    x = 2", 2),
    "else": ("if not self.is_sliding:\n    x = 1\nelse:\n    x = 2", 2),
    "elif": ("if self.layer_idx == 0:\n    x = 1\nelif self.layer_idx == 1:\n    x = 2\nelse:\n    x = 3", 2),
    "kept": ("x = 1\nif not self.is_sliding:\n    x = 2", 1),
    "agreeing branches": ("if q.any():\n    x = 2\nelse:\n    x = 2", 2),
    "branch that leaves": ("if q.any():\n    x = 1\n    return None\nelse:\n    x = 2", 2),
    "branches that raise": ("x = 1\nif q.any():\n    x = 2\n    if k.any():\n        raise ValueError\n    else:\n"
                            "        raise KeyError", 1),
    "with": ("with torch.no_grad():\n    x = 4", 4),
    "before with": ("x = 4\nwith torch.no_grad():\n    y = 1", 4),
    "before try": ("x = 4\ntry:\n    y = 1\nfinally:\n    z = 2", 4),
    "before loop": ("x = 4\nfor y in q:\n    z = x", 4),
    "comprehension's own variable": ("x = 4\ny = [x for x in q]", 4),
    "function's own variable": ("x = 4\ndef f():\n    x = 5", 4),
    "in a branch": ("x = 1\nif self.is_sliding:\n    x = 2\n    y = x\nx = y", 2),
}  # fmt: skip


@pytest.mark.parametrize("flow", FLOWS)
def test_locals_that_one_assignment_reaches(tmp_path: Path, flow: str) -> None:
    before, expected = FLOWS[flow]
    value = value_of(tmp_path, "x", before)
    assert (value.status, value.value) == (Status.RESOLVED, expected), value.reason


OPAQUE = {
    "branches": ("if q.any():\n    x = 1\nelse:\n    x = 2", "it depends on 'q.any()'"),
    "loop": ("for y in q:\n    x = 1", "kind For"),
    "loop variable": ("for x in q:\n    pass", "kind For"),
    "while": ("x = 1\nwhile q.any():\n    x = 2", "kind While"),
    "try": ("try:\n    x = 1\nexcept ValueError:\n    x = 2", "kind Try"),
    "except name": ("try:\n    pass\nexcept ValueError as x:\n    pass", "kind Try"),
    "with name": ("with q as x:\n    pass", "kind With"),
    "with jump": ("with q:\n    x = 1\n    raise ValueError", "assigned after a jump"),
    "import": ("import math as x", "kind Import"),
    "definition": ("def x(): pass", "kind FunctionDef"),
    "class": ("class x: pass", "kind ClassDef"),
    "delete": ("x = 1\ndel x", "kind Delete"),
    "walrus": ("y = (x := 1)", "kind Assign"),
    "walrus in a test": ("if (x := q):\n    pass", "kind If"),
    "starred": ("x, *y = q", "kind Assign"),
    "twice in one": ("x, x = 1, 2", "kind Assign"),
    "unequal": ("(x, y) = (1, 2, 3)[:2]", "kind Assign"),
    "starred value": ("x, y = *q, 2", "kind Assign"),
    "container": ("x = [1, 2]", "may change"),
    "never": (
        "if q.any():\n    x = 1\n    raise ValueError\nelse:\n    x = 2\n    raise KeyError",
        "no branch arrives",
    ),
    "unassigned": ("y = 1\nif False:\n    pass", "not assigned before"),
    "match": ("match q:\n    case {'a': x}:\n        pass", "kind Match"),
    "match rest": ("match q:\n    case {'a': 1, **x}:\n        pass", "kind Match"),
    "match star": ("match q:\n    case [1, *x]:\n        pass", "kind Match"),
    "augmented argument": ("x = q\nx += 1", "'q' is an argument"),
}


@pytest.mark.parametrize("flow", OPAQUE)
def test_locals_that_no_single_assignment_reaches(tmp_path: Path, flow: str) -> None:
    before, reason = OPAQUE[flow]
    if flow == "unassigned":
        before += "\ndef late():\n    pass"
    value = value_of(tmp_path, "x", before, "") if flow != "unassigned" else value_of(tmp_path, "attend_later", before)
    assert value.status is Status.DYNAMIC
    assert flow == "unassigned" or reason in value.reason


PLACES = {
    "loop that changes it": ("x = 1\nfor y in q:\n    {call}\n    x = 2", "a loop, a try or a header"),
    "in its own loop": ("for x in q:\n    {call}", "a loop, a try or a header"),
    "comprehension": ("[{call} for x in q]", "variable of a comprehension"),
    "lambda": ("f = lambda x: {call}", "read in a lambda"),
    "nested argument": ("def f(x):\n    {call}", "argument of a nested function"),
    "nested late": ("x = 1\ndef f():\n    {call}\nx = 2", "more than once around a nested"),
    "nested own": ("def f():\n    {call}\n    x = 2", "not assigned before"),
    "handler": ("try:\n    x = 1\nexcept ValueError:\n    {call}", "a loop, a try or a header"),
    "header": ("with q as x:\n    {call}", "a loop, a try or a header"),
    "test": ("if (x := q):\n    {call}", "a loop, a try or a header"),
    "same statement": ("y = (x := 1), {call}", "in the statement or loop that reads it"),
    "before": ("{call}\nx = 1", "not assigned before"),
    "loop's test": ("x = 1\nwhile {call}:\n    x = 2", "in the statement or loop"),
}


def placed(folder: Path, template: str) -> Value:
    lookup = "attend = ALL_ATTENTION_FUNCTIONS['sdpa']\n"
    call = "attend(self, q, k, v, attention_mask, scaling=1.0, softcap=x)"
    cls = write_class(folder, lookup + template.replace("{call}", call))
    return AttentionFuser().validate(cls()).arguments["softcap"]


@pytest.mark.parametrize("place", PLACES)
def test_places_where_a_local_cannot_be_told(tmp_path: Path, place: str) -> None:
    template, reason = PLACES[place]
    value = placed(tmp_path, template)
    assert value.status is Status.DYNAMIC
    assert reason in value.reason


@pytest.mark.parametrize(
    "template",
    [
        "x = 2\nfor y in q:\n    {call}",
        "x = 2\ntry:\n    {call}\nexcept ValueError:\n    pass",
        "try:\n    x = 2\n    {call}\nexcept ValueError:\n    pass",
        "x = 2\ndef f():\n    {call}",
        "x = 2\nf = lambda: {call}",
        "x = 2\nif q.any():\n    pass\nelse:\n    {call}",
        "for y in q:\n    x = 2\n    {call}",
        "x = 2\ntry:\n    pass\nexcept ValueError:\n    {call}",
        "x = 2\nmatch q:\n    case 1:\n        {call}",
    ],
)
def test_places_where_a_local_can_be_told(tmp_path: Path, template: str) -> None:
    assert placed(tmp_path, template).value == 2


def test_names_of_enclosing_functions(tmp_path: Path) -> None:
    text = """
    from tests.fusers.sources import Base
    def make(outer, empty):
        class Attention(Base):
            def forward(self, q):
                return ALL_ATTENTION_FUNCTIONS['sdpa'](self, q, q, q, None, scaling=outer, softcap=later, b=gone)
        gone = 1
        del gone
        if not empty:
            later = 4
        return Attention
    """
    finding = AttentionFuser().validate(write_module(tmp_path, text).make(0.5, False)())
    assert finding.scaling.value == 0.5
    assert finding.arguments["softcap"].value == 4
    assert "is empty" in finding.arguments["b"].reason


def test_the_interface_from_an_enclosing_function(tmp_path: Path) -> None:
    text = """
    from tests.fusers.sources import Base
    def make():
        table = ALL_ATTENTION_FUNCTIONS
        class Attention(Base):
            def forward(self, q):
                return table['sdpa'](self, q, q, q, None, scaling=0.5, s_aux=self.sinks)
        return Attention
    """
    assert AttentionFuser().validate(write_module(tmp_path, text).make()()).sink.source == "sinks"


def test_a_chain_of_assignments_that_is_too_long(tmp_path: Path) -> None:
    for count, step in ((3_000, "x = x + 1"), (120, "if q.any():\n    x = x + 1\nelse:\n    x = 1 + x")):
        value = value_of(tmp_path, "x", "x = 1\n" + "\n".join([step] * count))
        assert value.status is Status.DYNAMIC
        assert "too long" in value.reason or "too many steps" in value.reason
