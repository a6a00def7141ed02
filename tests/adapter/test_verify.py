"""verify: every family passes, the outcome can be read, and the model comes back as it was."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from rich.console import Console
from transformers import LlamaConfig, LlamaForCausalLM

import adapter
from adapter.verify import Probe, Verification, verify
from adapter.verify import subject as subject_module
from tests.adapter.probing import (
    CAUSALITY,
    DECODE,
    GRADIENTS,
    PADDING,
    PARALLEL,
    PROBES,
    SENSITIVITY,
    WINDOW,
    row,
    small,
)
from tests.families import INSTALLED, build, tokens

PARALLEL_REASON = "one process: torch.distributed is not initialised with two ranks or more"


def llama(**overrides):
    torch.manual_seed(0)
    fields = {
        "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.3,
    }  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**{**fields, **overrides})).eval()


@pytest.mark.parametrize("name", INSTALLED)
def test_every_family_passes(name):
    found = verify(build(name))
    assert found.ok, str(found)
    assert not found.adapted
    assert tuple(p.name for p in found.probes) == PROBES
    assert found.reference.number <= 1e-5
    skipped = {p.name: p.detail for p in found.probes if p.status == "skipped"}
    expected = {PARALLEL: PARALLEL_REASON}
    if name.startswith("hy_v4"):
        expected[WINDOW] = "no layer has a window"
    if name == "openai_privacy_filter":
        expected[DECODE] = "the model keeps no cache"
        assert skipped.pop(CAUSALITY).startswith("bidirectional model: later tokens change earlier logits")
    assert skipped == expected
    assert all(p.number <= p.limit == 1e-5 for p in found.probes if p.status == "pass")
    habit = "the model itself mixes padded tokens into real ones"
    assert (habit in row(found, PADDING).detail) == (name == "deepseek_v4")


def test_a_model_without_sinks_passes():
    found = verify(llama())
    assert found.ok, str(found)
    assert row(found, SENSITIVITY).detail == "no layer has a sink"
    assert row(found, WINDOW).detail == "no layer has a window"
    assert row(found, GRADIENTS).status == row(found, CAUSALITY).status == "pass"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_passes(dtype):
    found = verify(build("granite_swa", dtype, num_hidden_layers=2))
    assert found.ok, str(found)
    assert found.reference.detail.endswith("in fp32")


def test_a_window_longer_than_the_input_is_tried_on_a_longer_call():
    found = verify(small(sliding_window=400), input_ids=tokens(2, 12))
    assert found.ok, str(found)
    assert "1 on a call longer than the input" in row(found, WINDOW).detail


# The model comes back as it was.


@pytest.mark.parametrize("adapted", [False, True])
def test_the_model_is_left_as_it_was(adapted):
    model = small().train()
    model.model.layers[0].eval()
    model.model.layers[1].self_attn.sinks.requires_grad_(False)
    if adapted:
        adapter.adapt(model)
    before = _state(model)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    found = verify(model)
    assert torch.equal(torch.rand(3), expected)
    assert found.ok
    assert found.adapted is adapted is adapter.is_adapted(model)
    after = _state(model)
    tensors = (before.pop("tensors"), after.pop("tensors"))
    assert tensors[0].keys() == tensors[1].keys()
    assert all(torch.equal(tensors[0][k], tensors[1][k]) for k in tensors[0])
    assert after == before


def _state(model):
    return {
        "tensors": {k: v.clone() for k, v in [*model.named_parameters(), *model.named_buffers()]},
        "objects": {k: (id(p), p._version, p.requires_grad, p.grad) for k, p in model.named_parameters()},
        "modules": [(k, id(m), m.training, len(m._forward_pre_hooks)) for k, m in model.named_modules()],
        "config": (model.config.to_dict(), model.config._attn_implementation, model.generation_config.to_dict()),
        "chosen": [(dict(m.chosen), m.recorded) for m in model.modules() if isinstance(m, adapter.Attention)],
    }


def test_a_layer_that_a_first_call_attached_stays_attached():
    model = small()
    model.set_attn_implementation("sinkhold")
    model(input_ids=tokens(1, 4))
    before = _state(model)["modules"]
    assert verify(model).ok
    assert _state(model)["modules"] == before
    assert model.config._attn_implementation == "sinkhold"


# The outcome as an object, text, a table and JSON.


def test_given_tokens_and_tolerance_are_used(monkeypatch):
    monkeypatch.setattr(subject_module.Subject, "draw", _draw_recorder(drawn := []))
    found = verify(small(), input_ids=tokens(1, 16), tolerance=1e-12)
    assert (1, 16) not in drawn
    assert found.reference.limit == 1e-12
    assert "reference" in found.failed
    assert found.reference.detail == "logits of 1 x 16 tokens against transformers' eager attention"


def _draw_recorder(drawn):
    draw = subject_module.Subject.draw

    def record(self, batch, length, seed):
        drawn.append((batch, length))
        return draw(self, batch, length, seed)

    return record


def test_text_table_and_json():
    passed = Probe("causality", "pass", 0.0, 1e-5, "later tokens changed")
    failed = Probe("gradients", "fail", float("inf"), 1e-5, "worst: [dsink]")
    skipped = Probe("window edge", "skipped", None, None, "no layer has a window")
    found = Verification("a.Model", True, (passed, failed, skipped), replace(passed, name="reference"))
    assert (found.ok, found.failed) == (False, ("gradients",))
    assert str(found).splitlines() == [
        "a.Model (adapted): FAILED gradients",
        "  pass     reference    0.0e+00 / 1e-05     later tokens changed",
        "  pass     causality    0.0e+00 / 1e-05     later tokens changed",
        "  fail     gradients    inf / 1e-05         worst: [dsink]",
        "  skipped  window edge  -                   no layer has a window",
    ]
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(found.table())
    shown = console.export_text()
    assert all(text in shown for text in ("worst: [dsink]", "no layer has a window", "skipped", "gradients"))
    read = json.loads(found.to_json())
    assert read["ok"] is False
    assert [p["name"] for p in read["probes"]] == ["causality", "gradients", "window edge"]
    assert read["probes"][1]["number"] == "inf"
    assert read["reference"] == {**read["probes"][0], "name": "reference"}


def test_a_model_that_cannot_be_adapted_raises_and_stays():
    model = small()
    model.model.layers[0].self_attn.sinks.data[0] = float("nan")
    with pytest.raises(adapter.SinkholdError):
        verify(model)
    assert not adapter.is_adapted(model)
