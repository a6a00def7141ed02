"""verify: each probe fails when what it measures is broken on purpose."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import adapter
from adapter.backends import proof, registry
from adapter.backends.capability import Feature
from adapter.backends.eager import Eager
from adapter.backends.reference import Reference
from adapter.verify import parallel as parallel_probe
from adapter.verify import saving as saving_probe
from adapter.verify import verify
from tests.adapter.probing import (
    CAUSALITY,
    DECODE,
    GRADIENTS,
    PADDING,
    PARALLEL,
    SAVING,
    SENSITIVITY,
    WINDOW,
    row,
    small,
)
from tests.families import INSTALLED, build


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
    monkeypatch.setattr(proof, "prove", lambda backend, needs, **_: None)
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
        capability = replace(Eager.capability, features=~Feature.BACKWARD)

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
    monkeypatch.setattr(saving_probe, "LARGEST", 1000)
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
