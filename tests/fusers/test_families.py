"""What the fuser finds in live models of every family with sinks, and in models without."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn

from fusers.attention import AttentionFuser
from fusers.base import NO_SINK, LayerFinding, Outcome, SinkKind, Status
from fusers.source import forward_function
from tests.families import INSTALLED, build

PER_TOKEN = ("inkling2", "inkling2_loop")
SCALES = {"openai_privacy_filter": 1.0, "mimo_v2_flash": 24**-0.5, "hy_v4": 32**-0.5, "hy_v4_vl": 32**-0.5}
SCALES |= {"deepseek_v4": 32**-0.5}


def findings(model: nn.Module) -> dict[str, LayerFinding]:
    """The finding of every module that calls the interface."""
    fuser = AttentionFuser()
    found = {path: fuser.validate(module) for path, module in model.named_modules()}
    return {path: finding for path, finding in found.items() if finding.attention.outcome is not Outcome.NONE}


def text_attentions(model: nn.Module) -> dict[str, LayerFinding]:
    return {p: f for p, f in findings(model).items() if p.endswith("self_attn") and "vision" not in p}


@pytest.mark.parametrize("name", INSTALLED)
def test_sinks_and_scales_of_a_family(name: str) -> None:
    model = build(name)
    modules, found = dict(model.named_modules()), text_attentions(model)
    assert len(found) == (6 if name == "inkling2_loop" else 4)
    for path, finding in found.items():
        assert finding.attention.outcome is Outcome.RESOLVED, finding.attention.reason
        assert finding.scaling.value == pytest.approx(SCALES.get(name, 0.25), rel=1e-12)
        sink = finding.sink
        if name in PER_TOKEN:
            assert (sink.kind, sink.keyword, sink.source) == (SinkKind.PER_TOKEN, "sinks", None)
            assert sink.expression == "self.sink_proj(hidden_states).transpose(1, 2).unsqueeze(-1)"
        elif getattr(modules[path], "sinks", None) is None:
            assert name == "mimo_v2_flash"
            assert sink is NO_SINK
        else:
            assert (sink.kind, sink.keyword, sink.source) == (SinkKind.PER_HEAD, "s_aux", "sinks")
            assert modules[path].get_parameter(str(sink.source)) is modules[path].sinks
            assert (sink.shape, sink.dtype, sink.transforms) == ((4,), torch.float32, ())


@pytest.mark.parametrize("name", INSTALLED)
def test_the_source_says_what_the_forward_passes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every value that resolves is the one that a real forward hands to the interface."""
    model = build(name)
    found, seen = findings(model), dict[int, dict[str, Any]]()

    def record(module: nn.Module, q: Any, k: Any, v: Any, mask: Any, **kwargs: Any) -> Any:
        seen[id(module)] = kwargs
        return transformers.integrations.sdpa_attention.sdpa_attention_forward(module, q, k, v, None, scaling=1.0)

    attentions = {path: model.get_submodule(path) for path in found}
    for module in attentions.values():
        monkeypatch.setitem(forward_function(type(module)).__globals__, "eager_attention_forward", record)
    with torch.no_grad():
        model(torch.randint(3, 100, (1, 12)))
    checked = 0
    for path, module in attentions.items():
        for keyword, value in found[path].arguments.items():
            passed = seen.get(id(module), {}).get(keyword)
            if id(module) in seen and value.status is Status.RESOLVED and not hasattr(value.value, "path"):
                assert passed == value.value, (path, keyword)
                checked += 1
            elif id(module) in seen and value.status is Status.RESOLVED:
                assert passed is module.get_parameter(value.value.path)
                checked += 1
    assert checked >= 8


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_models_without_sinks(device: str) -> None:
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, vocab_size=64
    )
    with torch.device(device):
        found = findings(transformers.AutoModelForCausalLM.from_config(config))
    assert [f.sink for f in found.values()] == [NO_SINK, NO_SINK]
    assert [f.scaling.value for f in found.values()] == [8**-0.5, 8**-0.5]


def test_sinks_on_meta_and_in_half_precision() -> None:
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(build("gpt_oss").config).to(torch.bfloat16)
    for finding in findings(model).values():
        assert (finding.sink.source, finding.sink.dtype) == ("sinks", torch.bfloat16)


@pytest.mark.parametrize(("field", "expected"), [("layer_types", [8, None]), ("sliding_window", [5, None])])
def test_window_of_each_layer(field: str, expected: list[int | None]) -> None:
    overrides: dict[str, Any] = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
    if field == "sliding_window":
        overrides[field] = 5
    found = text_attentions(build("gpt_oss", **overrides))
    assert [f.arguments["sliding_window"].value for f in found.values()] == expected
