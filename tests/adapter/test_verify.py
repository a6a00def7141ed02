"""verify: every family passes, each probe fails when what it measures is broken, and the model comes back as it was."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from rich.console import Console
from transformers import LlamaConfig, LlamaForCausalLM

import adapter
from adapter.backends import proof, registry
from adapter.backends.eager import Eager
from adapter.backends.reference import Reference
from adapter.verify import Probe, Verification, verify
from adapter.verify import parallel as parallel_probe
from adapter.verify import subject as subject_module
from tests.families import INSTALLED, build, tokens

SENSITIVITY, CAUSALITY, WINDOW, PADDING = "sink sensitivity", "causality", "window edge", "padding rows"
GRADIENTS, DECODE, SAVING = "gradients", "prefill + decode = full", "save and load"
PARALLEL = "tensor parallel = single"
PROBES = (SENSITIVITY, CAUSALITY, WINDOW, PADDING, GRADIENTS, DECODE, PARALLEL, SAVING)
PARALLEL_REASON = "one process: torch.distributed is not initialised with two ranks or more"


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def llama(**overrides):
    torch.manual_seed(0)
    fields = {
        "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.3,
    }  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**{**fields, **overrides})).eval()


def small(name="gpt_oss", **overrides):
    """Two layers, one with a window of 8 and one without."""
    return build(name, num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"], **overrides)


def row(found: Verification, name: str) -> Probe:
    return next(p for p in found.rows if p.name == name)


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


# What is broken on purpose: a backend that computes something else.


class Broken(Eager):
    """Eager attention, but `change` rewrites each call first."""

    name = "broken"

    def __init__(self, change):
        self.change = change

    def attend(self, call):
        return super().attend(self.change(call))


@pytest.fixture
def broken(monkeypatch):
    """verify a model whose backend passed its proof and is wrong all the same."""
    monkeypatch.setattr(proof, "prove", lambda backend, needs: None)
    names = []

    def run(backend, model=None, **arguments):
        backend = backend if isinstance(backend, Eager) else Broken(backend)
        registry.register(backend)
        names.append(backend.name)
        model = small() if model is None else model
        with adapter.adapted(model, backend.name, recording=False):
            return verify(model, **arguments)

    yield run
    for name in names:
        registry.unregister(name)


def decoding(change):
    return lambda call: change(call) if call.query.shape[2] == 1 else call


def without_sinks(call):
    return replace(call, sinks=None)


def without_window(call):
    return replace(call, visibility=call.visibility.with_(left=None))


def one_wider(call):
    v = call.visibility
    return call if v.left is None else replace(call, visibility=v.with_(left=v.left + 1))


def one_narrower(call):
    v = call.visibility
    return call if v.left is None else replace(call, visibility=v.with_(left=v.left - 1))


def one_ahead(call):
    v = call.visibility
    return replace(call, visibility=v.with_(right=1)) if v.right == 0 and v.q_length > 1 else call


def without_padding(call):
    return replace(call, visibility=call.visibility.with_(padding=None))


def rotated_sinks(call):
    return call if call.sinks is None else replace(call, sinks=call.sinks.roll(1))


def scaled_sinks(call):
    return call if call.sinks is None else replace(call, sinks=call.sinks * 1.001)


class _Scaled(torch.autograd.Function):
    """The identity, with a gradient that is off by a factor."""

    @staticmethod
    def forward(ctx, tensor, factor):
        ctx.factor = factor
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.factor, None


def wrong_gradient(field, factor):
    return lambda call: replace(call, **{field: _Scaled.apply(getattr(call, field), factor)})


@pytest.mark.parametrize(
    ("change", "failed"),
    [
        (lambda call: call, set()),
        (decoding(without_sinks), {SENSITIVITY, DECODE}),
        (without_sinks, {"reference", SENSITIVITY, GRADIENTS}),
        (rotated_sinks, {"reference", SENSITIVITY, GRADIENTS}),
        (scaled_sinks, {"reference", SENSITIVITY, GRADIENTS}),
        (one_ahead, {"reference", CAUSALITY, DECODE, GRADIENTS, SENSITIVITY}),
        (without_window, {"reference", WINDOW, GRADIENTS, SENSITIVITY, DECODE}),
        (one_wider, {"reference", WINDOW, GRADIENTS, SENSITIVITY, DECODE}),
        (one_narrower, {"reference", WINDOW, GRADIENTS, SENSITIVITY}),
        (decoding(one_wider), {WINDOW}),
        (without_padding, {PADDING}),
        (wrong_gradient("sinks", -1.0), {GRADIENTS}),
        (wrong_gradient("sinks", 1.001), {GRADIENTS}),
        (wrong_gradient("query", 2.0), {GRADIENTS}),
        (wrong_gradient("key", 0.0), {GRADIENTS}),
        (wrong_gradient("value", 1.001), {GRADIENTS}),
    ],
)
def test_a_wrong_backend_fails_the_probes_of_what_it_breaks(broken, change, failed):
    found = broken(change)
    assert set(found.failed) == failed, str(found)
    assert found.ok == (not failed)


def test_the_gradient_at_fault_is_named(broken):
    assert "dsink of model.layers." in row(broken(wrong_gradient("sinks", -1.0)), GRADIENTS).detail


def test_sinks_that_hardly_show_are_raised_before_they_are_nudged(broken):
    model = small()
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            parameter.data.copy_(torch.tensor([float("-inf"), -60.0, -30.0, -40.0]))
    assert verify(model).ok
    assert set(broken(without_sinks, model).failed) == {SENSITIVITY, GRADIENTS}


def test_per_token_sinks_are_probed(broken):
    if "inkling2" not in INSTALLED:
        pytest.skip("this transformers has no per-token sinks")

    def half(call):
        return call if call.sinks is None else replace(call, sinks=call.sinks / 2)

    found = broken(half, build("inkling2", num_hidden_layers=2, layer_types=["hybrid_sliding", "hybrid"]))
    assert set(found.failed) == {"reference", SENSITIVITY, GRADIENTS}, str(found)


def test_a_backend_without_a_backward_is_for_inference_only(broken):
    class Forward(Reference, Eager):
        name = "forward"
        capability = replace(Eager.capability, features=~adapter.backends.capability.Feature.BACKWARD)

    found = broken(Forward())
    assert found.ok, str(found)
    assert row(found, GRADIENTS).status == "skipped"
    assert "no backward" in row(found, GRADIENTS).detail


def test_an_exception_in_a_probe_is_recorded_and_the_sinks_come_back(broken):
    def change(call):
        if call.query.shape[2] == 1:
            raise RuntimeError("no decode today")
        return call

    model = small()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    found = broken(change, model)
    assert set(found.failed) == {SENSITIVITY, WINDOW, DECODE}
    assert row(found, DECODE).detail == "RuntimeError: no decode today"
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


def test_a_mask_of_another_window_than_the_layer_declares_fails():
    model = small()
    model.model.layers[0].self_attn.sliding_window = 7
    found = row(verify(model), WINDOW)
    assert (found.status, found.number) == ("fail", None)
    assert found.detail == "model.layers.0.self_attn: the layer declares a window of 7, its mask reaches 7 back"


# What is broken on purpose: saving, and the ranks of a tensor-parallel run.


def _dropping(model):
    return {k: v for k, v in model.state_dict().items() if "layers.1.self_attn.sinks" not in k}


def _changing(model):
    return {k: v + 1e-6 if "layers.1.self_attn.sinks" in k else v for k, v in model.state_dict().items()}


@pytest.mark.parametrize("tensors", [_dropping, _changing])
def test_a_save_that_loses_or_changes_a_sink_fails(monkeypatch, tensors):
    model, save = small(), type(small()).save_pretrained
    monkeypatch.setattr(type(model), "save_pretrained", lambda m, folder: save(m, folder, state_dict=tensors(m)))
    found = verify(model)
    assert found.failed == (SAVING,)
    assert row(found, SAVING).detail == "model.layers.1.self_attn.sinks has other bytes after saving and loading"


def test_a_tensor_that_only_the_adapted_model_has_fails(monkeypatch):
    monkeypatch.setattr(adapter.Attention, "__init__", _with_tensor(adapter.Attention.__init__))
    found = verify(small())
    assert found.failed == (SAVING,)
    assert row(found, SAVING).detail == "model.layers.0.self_attn.attn.extra is lost in what plain transformers loads"


def _with_tensor(init):
    def patched(self, *args, **kwargs):
        init(self, *args, **kwargs)
        self.register_buffer("extra", torch.zeros(1))

    return patched


def test_a_large_model_is_compared_by_keys_and_shapes(monkeypatch):
    monkeypatch.setattr("adapter.verify.saving.LARGEST", 1000)
    found = row(verify(small()), SAVING)
    assert found.status == "pass"
    assert "are not written" in found.detail
    model = small()
    model.register_buffer("extra", torch.zeros(1))
    found = row(verify(model), SAVING)
    assert (found.status, found.detail) == ("fail", "extra is lost in what plain transformers loads")


@pytest.fixture
def two_ranks(monkeypatch):
    """This process as rank 0 of two; `other` says what rank 1 holds instead of a tensor of rank 0."""

    def run(other):
        def all_gather(found, tensor):
            found[0].copy_(tensor)
            found[1].copy_(other(tensor))

        monkeypatch.setattr(parallel_probe.dist, "is_initialized", lambda: True)
        monkeypatch.setattr(parallel_probe.dist, "get_world_size", lambda: 2)
        monkeypatch.setattr(parallel_probe.dist, "all_gather", all_gather)
        return verify(small())

    return run


def test_ranks_that_agree_pass(two_ranks):
    found = two_ranks(lambda tensor: tensor)
    assert row(found, PARALLEL).status == "pass"
    assert row(found, PARALLEL).detail == "2 ranks: logits and the sinks of 2 layers"
    assert row(found, SAVING).status == "skipped"


def test_ranks_with_other_logits_fail(two_ranks):
    assert two_ranks(lambda t: t * 1.01 if t.dim() == 3 else t).failed == (PARALLEL,)


def test_ranks_with_other_sinks_fail(two_ranks):
    found = two_ranks(lambda t: t + 1 if t.dim() == 1 else t)
    assert found.failed == (PARALLEL,)
    assert row(found, PARALLEL).detail == "the ranks hold different sinks in model.layers.0.self_attn"


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
