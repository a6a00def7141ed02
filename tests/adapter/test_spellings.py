"""Sinks and scales in other spellings than transformers' own, from the source to the output."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import adapter
from adapter.backends.call import AttentionCall, Visibility
from adapter.backends.registry import get
from adapter.errors import RefusedError, SourceError


class Config:
    _attn_implementation = "sinkhold"


class Base(nn.Module):
    """One layer of attention over its input, 4 heads of 8."""

    def __init__(self):
        super().__init__()
        self.config = Config()
        self.sinks = nn.Parameter(torch.tensor([2.0, 3.0, 4.0, 5.0]))
        self.head_dim = 8
        self.scaling = 0.5


class Cast(Base):
    def forward(self, x):
        attention_interface = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, None)
        return attention_interface(self, x, x, x, None, scaling=self.head_dim**-0.5, s_aux=self.sinks.to(torch.float64))


class Reshaped(Base):
    def forward(self, x):
        attention_interface = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, None)
        return attention_interface(self, x, x, x, None, scaling=1.0, s_aux=self.sinks.view(1, -1, 1, 1))


class Shifted(Base):
    def forward(self, x):
        attention_interface = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, None)
        return attention_interface(self, x, x, x, None, scaling=self.scaling, s_aux=self.sinks + 1)


class PerToken(Base):
    def __init__(self):
        super().__init__()
        self.sink_of = nn.Linear(8, 1)

    def forward(self, x):
        attention_interface = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, None)
        sinks = self.sink_of(x)
        return attention_interface(self, x, x, x, None, scaling=self.scaling, sinks=sinks)


class Hidden(Base):
    def forward(self, x):
        attention_interface = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, None)
        keywords = dict(zip(("scaling", "s_aux"), (0.5, self.sinks), strict=True))
        return attention_interface(self, x, x, x, None, **keywords)


class LearnedKeys(Base):
    def forward(self, x):
        attention_interface = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, None)
        return attention_interface(self, x, x, x, None, scaling=self.scaling, sink_keys=self.sinks)


SCALES = {Cast: 8**-0.5, Reshaped: 1.0, Shifted: 0.5, PerToken: 0.5, Hidden: 0.5}


@pytest.mark.parametrize("cls", SCALES)
def test_every_spelling_with_one_meaning_gives_the_reference_output(cls):
    module, x = cls(), torch.randn(2, 4, 6, 8)
    adapter.adapt(module)
    with torch.no_grad():
        ours, _ = module(x)
        sinks = {Shifted: lambda: module.sinks + 1, PerToken: lambda: module.sink_of(x)}.get(
            cls, lambda: module.sinks
        )()
        call = AttentionCall(x, x, x, SCALES[cls], Visibility(2, 6, 6), sinks=sinks)
        expected = get("reference").attend(call).output
        dropped = get("reference").attend(AttentionCall(x, x, x, SCALES[cls], Visibility(2, 6, 6))).output
    assert (ours - expected).abs().max() <= 1e-5
    assert (dropped - expected).abs().max() > 0.05


def test_a_keyword_that_is_a_sink_of_another_kind_is_refused():
    with pytest.raises(RefusedError, match="sink_keys"):
        adapter.adapt(LearnedKeys())


def test_a_source_that_cannot_be_read_is_never_no_sink():
    namespace = {"ALL_ATTENTION_FUNCTIONS": ALL_ATTENTION_FUNCTIONS, "Base": Base, "__name__": __name__}
    source = """class Unseen(Base):
        def forward(self, x):
            f = ALL_ATTENTION_FUNCTIONS['sinkhold']
            return f(self, x, x, x, None, s_aux=self.sinks)
    """
    exec(source, namespace)  # noqa: S102  a class without a source file, as a notebook's or an exec'd one
    model = nn.Sequential(namespace["Unseen"]())
    with pytest.raises(SourceError) as caught:
        adapter.adapt(model)
    assert "where: 0, " in str(caught.value)
