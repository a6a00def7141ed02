"""The spellings of scale, sink and lookup found in the field: those with one meaning resolve, the rest say why not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fusers.attention import AttentionFuser
from fusers.base import NO_SINK, Outcome, SinkKind, Status, TensorRef
from fusers.errors import RefusedError, ResolveError

from .sources import LOOKUP, QKV, write_call, write_class

PROPERTY = """
@property
def scale(self):
    "The scale."
    return self.head_dim ** -0.5
"""

SCALES = {
    "attribute": ("scaling=self.scaling", 0.25),
    "property": ("scaling=self.scale", 0.25),
    "literal": ("scaling=1.0", 1.0),
    "negative literal": ("scaling=-1.0", -1.0),
    "none": ("scaling=None", None),
    "power": ("scaling=self.head_dim ** -0.5", 0.25),
    "config": ("scaling=self.config.attention_multiplier", 0.5),
    "local": ("scaling=scale", 0.25),
    "tensor": ("scaling=torch.tensor(0.5)", 0.5),
    "square root": ("scaling=1 / math.sqrt(self.head_dim)", 0.25),
    "float": ("scaling=float(self.head_dim) ** -0.5", 0.25),
    "getattr": ("scaling=getattr(self, 'absent', 2.0)", 2.0),
    "literal dict": ("**{'scaling': self.scaling}", 0.25),
    "local dict": ("**options", 0.25),
    "dict call": ("**dict(scaling=self.scaling)", 0.25),
    "subscript": ("scaling=self.config.scales[self.config.layer_types[self.layer_idx]]", 0.25),
    "conditional": ("scaling=0.5 if self.layer_idx == 0 else 0.75", 0.75),
    "global": ("scaling=CONSTANT", 0.125),
}


@pytest.mark.parametrize("spelling", SCALES)
def test_scale_with_one_meaning(tmp_path: Path, spelling: str) -> None:
    keywords, expected = SCALES[spelling]
    before = "scale = self.head_dim ** -0.5\noptions = {'scaling': self.scaling, 'sliding_window': 8}"
    cls = write_call(tmp_path, keywords, before, PROPERTY)
    finding = AttentionFuser().validate(cls())
    assert finding.attention.outcome is Outcome.RESOLVED, finding.attention.reason
    assert finding.scaling.status is Status.RESOLVED
    assert finding.scaling.value == expected
    assert finding.sink is NO_SINK


UNKNOWN_SCALES = {
    "positional": ("0.25", "order of the positional arguments"),
    "absent": ("dropout=0.0", "no scale is passed"),
    "spread of a call": ("**make(self)", "spread from 'make(self)'"),
    "run time": ("scaling=q.shape[-1] ** -0.5", "'q' is an argument of the forward"),
    "parameter": ("scaling=self.sinks.mean()", "is the tensor 'sinks'"),
    "touched dict": ("**options", "spread from 'options'"),
}


@pytest.mark.parametrize("spelling", UNKNOWN_SCALES)
def test_scale_without_one_meaning_is_never_guessed(tmp_path: Path, spelling: str) -> None:
    keywords, reason = UNKNOWN_SCALES[spelling]
    before = "make = eager\noptions = {'scaling': 1.0}\noptions['scaling'] = 2.0"
    finding = AttentionFuser().validate(write_call(tmp_path, keywords, before)())
    assert finding.attention.outcome is Outcome.DYNAMIC
    assert finding.scaling.status is not Status.RESOLVED
    assert reason in finding.scaling.reason


@pytest.mark.parametrize("scale", ["'auto'", "True", "1e400", "float('nan')"])
def test_scale_that_is_no_finite_number(tmp_path: Path, scale: str) -> None:
    members = f"scale = {scale}"
    with pytest.raises(ResolveError, match="not a finite number") as caught:
        AttentionFuser().validate(write_call(tmp_path, "scaling=self.scale", members=members)())
    assert "written_" in caught.value.where


PER_HEAD = {
    "attribute": ("s_aux=self.sinks", "sinks", ()),
    "cast": ("s_aux=self.sinks.to(q.dtype)", "sinks", ("to",)),
    "view": ("s_aux=self.sinks.view(1, -1, 1, 1)", "sinks", ("view",)),
    "chain": ("s_aux=self.sinks.float().reshape(1, -1).expand(2, -1)", "sinks", ("float", "reshape", "expand")),
    "axes": ("s_aux=self.sinks[None, :, None, None]", "sinks", ("unsqueeze",)),
    "function": ("s_aux=torch.reshape(self.sinks, (1, -1, 1, 1))", "sinks", ("reshape",)),
    "getattr": ("s_aux=getattr(self, 'sinks', None)", "sinks", ()),
    "conditional": ("s_aux=self.sinks if self.is_sliding else None", "sinks", ()),
    "local": ("s_aux=local", "sinks", ("contiguous",)),
    "submodule": ("s_aux=self.sub.sinks", "sub.sinks", ()),
    "listed submodule": ("s_aux=self.layers[self.layer_idx].sinks", "layers.1.sinks", ()),
    "buffer": ("s_aux=self.buffered", "buffered", ()),
    "other keyword": ("sinks=self.sinks", "sinks", ()),
    "spread": ("**{'s_aux': self.sinks}", "sinks", ()),
    "data": ("s_aux=self.sinks.data", "sinks", ("data",)),
    "not none": ("s_aux=self.sinks if self.sinks is not None else None", "sinks", ()),
}  # fmt: skip


@pytest.mark.parametrize("spelling", PER_HEAD)
def test_sink_for_each_head(tmp_path: Path, spelling: str) -> None:
    keywords, source, transforms = PER_HEAD[spelling]
    cls = write_call(tmp_path, f"scaling=1.0, {keywords}", "local = self.sinks.contiguous()")
    finding = AttentionFuser().validate(cls())
    assert finding.attention.outcome is Outcome.RESOLVED, finding.attention.reason
    assert (finding.sink.kind, finding.sink.source) == (SinkKind.PER_HEAD, source)
    assert (finding.sink.transforms, finding.sink.exact) == (transforms, True)
    assert (finding.sink.shape, finding.sink.dtype) == ((4,), torch.float32)
    assert finding.sink.keyword == ("sinks" if spelling == "other keyword" else "s_aux")
    assert isinstance(finding.arguments[finding.sink.keyword].value, TensorRef)


CHANGED = {
    "addition": ("self.sinks + 1", "+ 1"),
    "reflected": ("2 * self.sinks", "2 *"),
    "negation": ("-self.sinks", "negate"),
    "method": ("self.sinks.exp()", "exp"),
    "function": ("torch.exp(self.sinks)", "exp"),
    "row": ("self.table[self.layer_idx]", "[self.layer_idx]"),
}


@pytest.mark.parametrize("spelling", CHANGED)
def test_sink_computed_from_a_parameter_is_left_to_the_recording(tmp_path: Path, spelling: str) -> None:
    expression, transform = CHANGED[spelling]
    finding = AttentionFuser().validate(write_call(tmp_path, f"scaling=1.0, s_aux={expression}")())
    assert finding.attention.outcome is Outcome.DYNAMIC
    assert finding.sink.kind is SinkKind.PER_HEAD
    assert finding.sink.source == ("table" if spelling == "row" else "sinks")
    assert finding.sink.transforms == (transform,)
    assert not finding.sink.exact


@pytest.mark.parametrize(
    "expression",
    ["None", "self.no_sinks", "self.sinks if not self.is_sliding else None", "getattr(self, 'absent', None)"],
)
def test_no_sink_on_this_layer(tmp_path: Path, expression: str) -> None:
    finding = AttentionFuser().validate(write_call(tmp_path, f"scaling=1.0, s_aux={expression}")())
    assert finding.sink is NO_SINK
    assert finding.arguments["s_aux"].status is Status.RESOLVED


@pytest.mark.parametrize("keyword", ["s_aux", "sinks"])
@pytest.mark.parametrize(
    ("before", "expression"),
    [
        ("made = self.sink_proj(q).transpose(1, 2).unsqueeze(-1)", "made"),
        ("h = q + 1", "self.sink_proj(h).transpose(1, 2).unsqueeze(-1)"),
        ("pass", "self.sink_proj(q).transpose(1, 2).unsqueeze(-1) if self.is_sliding else None"),
    ],
)
def test_sink_for_each_token(tmp_path: Path, keyword: str, before: str, expression: str) -> None:
    finding = AttentionFuser().validate(write_call(tmp_path, f"scaling=1.0, {keyword}={expression}", before)())
    assert finding.attention.outcome is Outcome.RESOLVED, finding.attention.reason
    assert finding.sink.kind is SinkKind.PER_TOKEN
    assert finding.sink.keyword == keyword
    assert finding.sink.source is None
    assert "self.sink_proj(" in str(finding.sink.expression)
    if " if " not in expression:
        assert finding.sink.transforms == ("transpose", "unsqueeze")


@pytest.mark.parametrize(
    "expression",
    [
        "q", "kwargs.get('s_aux')", "self.make(q.device)", "self.sinks if q.shape[0] > 1 else None", "given", "later",
        "self.sinks if self.training else None",
    ],
)  # fmt: skip
def test_sink_that_the_source_cannot_tell(tmp_path: Path, expression: str) -> None:
    before = "given, rest = q\nif q.any():\n    later = self.sinks\nelse:\n    later = self.other_sinks"
    finding = AttentionFuser().validate(write_call(tmp_path, f"scaling=1.0, s_aux={expression}", before)())
    assert finding.attention.outcome is Outcome.DYNAMIC
    assert finding.sink.kind is SinkKind.NONE
    assert not finding.sink.exact
    assert finding.arguments["s_aux"].status is Status.DYNAMIC
    assert finding.arguments["s_aux"].reason


@pytest.mark.parametrize(
    "keyword", ["sink_bias", "attn_sink", "sink_keys", "learned_kv", "null_key", "softmax_offset", "add_zero_attn"]
)
def test_other_kinds_of_sink_are_refused_by_name(tmp_path: Path, keyword: str) -> None:
    fuser, cls = AttentionFuser(), write_call(tmp_path, f"scaling=1.0, {keyword}=self.sinks")
    assert fuser.match(cls).outcome is Outcome.REFUSED
    with pytest.raises(RefusedError, match=f"'{keyword}' names a kind of sink that is not implemented"):
        fuser.validate(cls())


@pytest.mark.parametrize(
    ("keywords", "reason"),
    [
        ("s_aux=self.sinks, sinks=self.other_sinks", "two sinks"),
        ("s_aux=0.0", "0.0, not a tensor"),
        ("s_aux=self.table", r"shape \(2, 4\), which is not one logit for each head"),
        ("s_aux=self.sinks, **{'s_aux': None}", "'s_aux' twice"),
    ],
)
def test_calls_without_a_meaning_are_refused(tmp_path: Path, keywords: str, reason: str) -> None:
    with pytest.raises(RefusedError, match=reason):
        AttentionFuser().validate(write_call(tmp_path, f"scaling=1.0, {keywords}")())


def test_a_sink_keyword_named_otherwise_may_be_none(tmp_path: Path) -> None:
    assert AttentionFuser().validate(write_call(tmp_path, "scaling=1.0, attn_sink=None")()).sink is NO_SINK


PASSED = "scaling=self.scaling, s_aux=self.sinks"
TAIL = f"{QKV}, {PASSED}"
LOOKUPS = {
    "inline": f"return ALL_ATTENTION_FUNCTIONS['sdpa']({TAIL})",
    "inline interface": f"return ALL_ATTENTION_FUNCTIONS.get_interface('sdpa', eager)({TAIL})",
    "aliased import": f"f = TABLE['sdpa']\nreturn f({TAIL})",
    "module attribute": f"return utils.ALL_ATTENTION_FUNCTIONS['sdpa']({TAIL})",
    "dotted module": f"return transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS['sdpa']({TAIL})",
    "import in the forward": "from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as LOCAL\n"
    f"return LOCAL['sdpa']({TAIL})",
    "local table": f"table = ALL_ATTENTION_FUNCTIONS\nreturn table['sdpa']({TAIL})",
    "new table": f"return AttentionInterface()['sdpa']({TAIL})",
    "global mapping": f"return AttentionInterface._global_mapping['sdpa']({TAIL})",
    "conditional": f"f = eager if self.layer_idx else ALL_ATTENTION_FUNCTIONS['sdpa']\nreturn f({TAIL})",
    "old style": f"f = eager\nif self.layer_idx:\n    f = ALL_ATTENTION_FUNCTIONS['sdpa']\nreturn f({TAIL})",
    "get": f"return (ALL_ATTENTION_FUNCTIONS.get('sdpa') or eager)({TAIL})",
    "walrus": f"return (f := ALL_ATTENTION_FUNCTIONS['sdpa'])({TAIL})",
    "renamed": f"f = ALL_ATTENTION_FUNCTIONS['sdpa']\ng = f\nreturn g({TAIL})",
    "partial": f"f = partial(ALL_ATTENTION_FUNCTIONS['sdpa'], {QKV}, scaling=self.scaling)\nreturn f(s_aux=self.sinks)",
    "inline partial": f"{LOOKUP}\nreturn functools.partial(attend, self, scaling=self.scaling)(q, k, v, "
    "s_aux=self.sinks)",
    "renamed partial": f"{LOOKUP}\nf = partial(attend, {TAIL})\ng = f\nreturn g()",
    "unpacked": f"{LOOKUP}\nqkv = (q, k, v)\nreturn attend(self, *qkv, {PASSED})",
    "comprehension": f"{LOOKUP}\nreturn [attend(self, x, k, v, {PASSED}) for x in q]",
    "loop": f"{LOOKUP}\nfor x in q:\n    y = attend(self, x, k, v, {PASSED})\nreturn y",
    "keywords only": f"{LOOKUP}\nreturn attend(module=self, query=q, key=k, value=v, {PASSED})",
    "nested function": f"{LOOKUP}\ndef inner(x):\n    return attend(self, x, k, v, {PASSED})\nreturn inner(q)",
    "lambda": f"{LOOKUP}\nreturn (lambda x: attend(self, x, k, v, {PASSED}))(q)",
    "tuple": f"f, g = ALL_ATTENTION_FUNCTIONS['sdpa'], 1\nreturn f({TAIL})",
    "two calls": f"{LOOKUP}\na = attend({TAIL})\nreturn a, attend({TAIL})",
    "compared": f"{LOOKUP}\nif attend is not eager:\n    print(attend.__name__)\nreturn attend({TAIL})",
}  # fmt: skip


@pytest.mark.parametrize("spelling", LOOKUPS)
def test_lookup_of_the_interface(tmp_path: Path, spelling: str) -> None:
    finding = AttentionFuser().validate(write_class(tmp_path, LOOKUPS[spelling])())
    assert finding.attention.outcome is Outcome.RESOLVED, finding.attention.reason
    assert finding.scaling.value == 0.25
    assert (finding.sink.kind, finding.sink.source) == (SinkKind.PER_HEAD, "sinks")
    assert len(finding.attention.calls) == (2 if spelling == "two calls" else 1)
    assert finding.attention.calls[0].in_loop is (spelling in ("loop", "comprehension"))


HIDDEN = {
    "handed on": f"{LOOKUP}\nreturn self.run(attend, {TAIL})",
    "returned": f"{LOOKUP}\nreturn attend",
    "kept": f"self.f = ALL_ATTENTION_FUNCTIONS['sdpa']\nreturn self.f({TAIL})",
    "in a list": f"fs = [ALL_ATTENTION_FUNCTIONS['sdpa']]\nreturn fs[0]({TAIL})",
    "unpacked list": f"{LOOKUP}\nreturn attend(self, *q, **self.options)",
    "partial on some paths": f"{LOOKUP}\nif q.any():\n    attend = partial(attend, scaling=1.0)\nreturn "
    f"attend({QKV})",
    "chosen partial": f"{LOOKUP}\nreturn (partial(attend, scaling=1.0) if q.any() else eager)({QKV})",
    "computed keyword": f"{LOOKUP}\nreturn attend({QKV}, **{{self.name: self.sinks}})",
    "keyword put in": f"kwargs['s_aux'] = self.sinks\n{LOOKUP}\nreturn attend({QKV}, **kwargs)",
    "keyword updated": f"kwargs.update(s_aux=self.sinks)\n{LOOKUP}\nreturn attend({QKV}, **kwargs)",
    "keywords replaced": f"kwargs = self.options\n{LOOKUP}\nreturn attend({QKV}, **kwargs)",
    "dict with unknown": f"{LOOKUP}\nreturn attend({QKV}, **dict(**self.options))",
    "literal with unknown": f"{LOOKUP}\nreturn attend({QKV}, **{{**self.options}})",
}  # fmt: skip


@pytest.mark.parametrize("spelling", HIDDEN)
def test_what_the_source_hides_is_dynamic_and_never_no_sink(tmp_path: Path, spelling: str) -> None:
    finding = AttentionFuser().validate(write_class(tmp_path, HIDDEN[spelling])())
    assert finding.attention.outcome is Outcome.DYNAMIC
    assert finding.attention.reason
    assert finding.scaling.status is Status.DYNAMIC
    assert finding.sink.kind is SinkKind.NONE
    assert not finding.sink.exact
    assert finding.arguments["s_aux"].status is Status.DYNAMIC
