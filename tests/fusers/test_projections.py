"""Which linears feed query, key and value, and which one takes the output: read from the source of a forward."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from torch import nn

from fusers.attention import AttentionFuser
from fusers.projections import Projections, find_projections

from .sources import LOOKUP, write_module

Names = tuple[str, ...]
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "more")
CALL = f"{LOOKUP}\nout, weights = attend(self, query, key, value, attention_mask, scaling=self.scaling)"
PLAIN = """
query = self.q_proj(q)
key = self.k_proj(q)
value = self.v_proj(q)
"""
END = "return self.o_proj(out), weights"


FUNCTIONS = """
def swap(a, b):
    return b, a

def first(a, b=None):
    return a

def both(*parts):
    return sum(parts)
"""


def projections_of(folder: Path, before: str = PLAIN, end: str = END) -> Projections | None:
    body = textwrap.indent(f"{before}\n{CALL}\n{end}", "        ")
    written = write_module(
        folder,
        f"{FUNCTIONS}\nfrom tests.fusers.sources import Base\n\nclass Attention(Base):\n"
        f"    def forward(self, q, k, v, attention_mask=None, cache=None, **kwargs):\n{body}",
    )
    module = written.Attention()
    for name in LINEARS:
        setattr(module, name, nn.Linear(8, 8))
    module.norm = nn.LayerNorm(8)
    module.drop = nn.Dropout()
    module.latent = nn.Sequential(nn.Linear(8, 4), nn.LayerNorm(4), nn.Linear(4, 8))
    return find_projections(module, AttentionFuser().match(type(module)))


def expect(
    query: Names = ("q_proj",),
    key: Names = ("k_proj",),
    value: Names = ("v_proj",),
    output: Names = ("o_proj",),
    through: Names = (),
) -> Projections:
    return Projections(query, key, value, output, through)


BEFORE = {
    "plain": (PLAIN, expect()),
    "reshaped": (PLAIN + "query = query.view(1, 2, -1, 4).transpose(1, 2)", expect()),
    "through a norm": (PLAIN + "query, key = self.norm(query), self.norm(key)", expect(through=("norm",))),
    "without parameters": (PLAIN + "query = self.drop(query)", expect()),
    "latent": (PLAIN.replace("self.q_proj", "self.latent"), expect(query=("latent",))),
    "in a tuple": ("query, key, value = self.q_proj(q), self.k_proj(q), self.v_proj(q)", expect()),
    "entry of a tuple": ("parts = (self.q_proj(q), self.k_proj(q), self.v_proj(q))\n"
                         "query, key, value = parts[0], parts[1], parts[2]", expect()),
    "fused": ("query, key, value = self.q_proj(q).chunk(3, -1)",
              expect(key=("q_proj",), value=("q_proj",))),
    "key is value": (PLAIN + "value = key", expect(value=("k_proj",))),
    "summed": (PLAIN + "query = query + self.more(q)", expect(query=("more", "q_proj"))),
    "augmented": (PLAIN + "query += self.more(q)", expect(query=("more", "q_proj"))),
    "annotated": (PLAIN + "query: object = self.more(q)", expect(query=("more",))),
    "replaced": (PLAIN + "query = self.more(q)", expect(query=("more",))),
    "in a branch": (PLAIN + "if self.is_sliding:\n    query = self.more(q)", expect(query=("more", "q_proj"))),
    "in both branches": (PLAIN + "if q.any():\n    query = self.more(q)\nelse:\n    query = self.more(k)",
                         expect(query=("more",))),
    "only known in one branch": (PLAIN + "if q.any():\n    extra = self.more(q)\nquery = query + extra",
                                 expect(query=("more", "q_proj"))),
    "in a loop": (PLAIN + "extra = q\nfor part in (1, 2):\n    query = query + extra\n    extra = self.more(q)",
                  expect(query=("more", "q_proj"))),
    "loop variable": (PLAIN + "for part in [self.more(q)]:\n    query = query + part",
                      expect(query=("more", "q_proj"))),
    "comprehension": (PLAIN + "query = sum([part for part in (query, self.more(q))])",
                      expect(query=("more", "q_proj"))),
    "walrus": (PLAIN + "query = query + (extra := self.more(q))\nvalue = value + extra",
               expect(query=("more", "q_proj"), value=("more", "v_proj"))),
    "with": (PLAIN + "with torch.no_grad() as extra:\n    query = self.more(q)", expect(query=("more",))),
    "with name": (PLAIN + "with self.more(q) as extra:\n    query = query + extra",
                  expect(query=("more", "q_proj"))),
    "handler": (PLAIN + "try:\n    pass\nexcept ValueError:\n    query = query + self.more(q)",
                expect(query=("more", "q_proj"))),
    "finally": (PLAIN + "try:\n    pass\nfinally:\n    query = query + self.more(q)",
                expect(query=("more", "q_proj"))),
    "after a loop": (PLAIN + "for part in q:\n    pass\nelse:\n    query = query + self.more(q)",
                     expect(query=("more", "q_proj"))),
    "conditional expression": (PLAIN + "query = query if self.is_sliding else self.more(q)",
                               expect(query=("more", "q_proj"))),
    "keyword of a function": (PLAIN + "query = torch.add(query, other=self.more(q))",
                              expect(query=("more", "q_proj"))),
    "cache": (PLAIN + "key, value = cache.update(key, value, 0)", expect()),
    "something else's update": (PLAIN + "both = cache.update(key, value)\nvalue = both",
                                expect(value=("k_proj", "v_proj"))),
    "starred": (PLAIN + "query, key = swap(*[query, key])",
                expect(query=("k_proj",), key=("q_proj",))),
    "starred, number unknown": (PLAIN + "query, key = swap(*list([query, key]))",
                                expect(query=("k_proj", "q_proj"), key=("k_proj", "q_proj"))),
    "match": (PLAIN + "match 1:\n    case 1:\n        query = query + self.more(q)",
              expect(query=("more", "q_proj"))),
}  # fmt: skip


@pytest.mark.parametrize("form", BEFORE)
def test_what_the_parts_are_made_of(tmp_path: Path, form: str) -> None:
    before, expected = BEFORE[form]
    assert projections_of(tmp_path, before) == expected


END_FORMS = {
    "reshaped": ("out = out.reshape(1, 2, -1)\nreturn self.o_proj(out), weights", ("o_proj",)),
    "two takers": ("return self.o_proj(out) + self.more(out), weights", ("more", "o_proj")),
    "none": ("return out, weights", ()),
    "the weights are not the output": ("extra = self.more(weights)\nreturn self.o_proj(out), weights", ("o_proj",)),
    "gated": ("out = out * self.more(q).sigmoid()\nreturn self.o_proj(out), weights", ("o_proj",)),
}


@pytest.mark.parametrize("form", END_FORMS)
def test_what_takes_the_output(tmp_path: Path, form: str) -> None:
    end, takers = END_FORMS[form]
    found = projections_of(tmp_path, end=end)
    assert found is not None
    assert found.output == takers


def test_heads_can_be_split_where_each_part_has_a_linear_of_its_own() -> None:
    assert expect(through=("norm",)).is_plain
    assert not expect(value=("k_proj",)).is_plain
    assert not expect(query=("more", "q_proj")).is_plain
    assert not expect(output=()).is_plain
    assert not expect(output=("q_proj",)).is_plain


def test_two_calls_of_the_interface_have_no_projections(tmp_path: Path) -> None:
    assert projections_of(tmp_path, end=f"{CALL}\n{END}") is None


@pytest.mark.parametrize(
    ("line", "query", "key"),
    [
        ("query, key = swap(query, key)", ("k_proj",), ("q_proj",)),
        ("query, key = swap(b=query, a=key)", ("q_proj",), ("k_proj",)),
        # what a function leaves out may still be seen: only a result made of all that is given is trusted
        ("query = first(query, key)", ("k_proj", "q_proj"), ("k_proj",)),
        ("query = both(query, key)", ("k_proj", "q_proj"), ("k_proj",)),
        ("query = unknown(query, key)", ("k_proj", "q_proj"), ("k_proj",)),
    ],
)
def test_functions_of_the_file_are_followed(tmp_path: Path, line: str, query: Names, key: Names) -> None:
    found = projections_of(tmp_path, f"{PLAIN}\n{line}")
    assert found is not None
    assert (found.query, found.key) == (query, key)
