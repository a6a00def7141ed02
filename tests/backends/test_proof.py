"""Backends that accept a sink and get it wrong are found before their first use; the proof itself leaves no trace."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch

from adapter.backends import proof, registry
from adapter.backends.capability import Feature, Needs
from adapter.errors import ProofError

SINK, TRAIN = Feature.SINK_PER_HEAD, Feature.BACKWARD | Feature.SINK_GRADIENT
PREFILL = Needs("cpu", None, torch.float32, 4, 2, 16, 16, False, Feature.CAUSAL | SINK)
DECODE = replace(PREFILL, decode=True)
WINDOW = replace(PREFILL, features=PREFILL.features | Feature.WINDOW)
TRAINING = replace(PREFILL, features=PREFILL.features | TRAIN)


class Fake:
    """The reference, told when to forget the sink."""

    capability = registry.get("reference").capability

    def __init__(self, forgets, name="fake"):
        self.forgets, self.name, self.calls = forgets, name, 0

    def unavailable(self):
        return None

    def attend(self, call):
        self.calls += 1
        change = self.forgets(call)
        return registry.get("reference").attend(replace(call, sinks=change) if call.sinks is not None else call)


FAULTS = {
    "always": (lambda c: None, {PREFILL, DECODE, WINDOW, TRAINING}),
    "in decode": (lambda c: None if c.query.shape[2] == 1 else c.sinks, {DECODE}),
    "with a window": (lambda c: None if c.visibility.left is not None else c.sinks, {WINDOW}),
    "in the gradient": (lambda c: c.sinks.detach(), {TRAINING}),
    "never": (lambda c: c.sinks, set()),
}


@pytest.fixture
def registered():
    added = []

    def add(forgets):
        backend = Fake(forgets)
        registry.register(backend)
        added.append(backend)
        return backend

    yield add
    for backend in added:
        registry.unregister(backend.name)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_sink_forgotten_is_found_exactly_where_it_is_forgotten(registered, fault):
    forgets, wrong_for = FAULTS[fault]
    registered(forgets)
    for needs in (PREFILL, DECODE, WINDOW, TRAINING):
        if needs in wrong_for:
            with pytest.raises(ProofError, match="backend 'fake' is wrong"):
                registry.select("fake", needs)
        else:
            assert registry.select("fake", needs).name == "fake"


def test_the_error_names_the_case_and_the_tensor(registered):
    registered(FAULTS["in the gradient"][0])
    with pytest.raises(ProofError) as caught:
        registry.select("fake", TRAINING)
    assert "gradient of sinks is off by" in caught.value.what
    assert "cpu float32, 4/2 heads of 16/16, q 34 at 0 of kv 34" in caught.value.where


def test_a_failure_is_kept_and_raised_again(registered):
    backend = registered(FAULTS["always"][0])
    for _ in range(3):
        with pytest.raises(ProofError):
            registry.select("fake", PREFILL)
    assert backend.calls == 1


def test_a_success_is_kept(registered):
    backend = registered(FAULTS["never"][0])
    for _ in range(3):
        registry.select("fake", PREFILL)
    assert backend.calls == 2
    assert proof.is_proven(backend, PREFILL)
    assert not proof.is_proven(backend, DECODE)


def test_a_backend_that_cannot_run_fails_its_proof(registered):
    def explode(call):
        raise ValueError("no kernel image")

    registered(explode)
    with pytest.raises(ProofError, match="cannot run: ValueError\\('no kernel image'\\)"):
        registry.select("fake", PREFILL)


def test_auto_does_not_pass_over_a_backend_that_fails(monkeypatch):
    monkeypatch.setitem(registry._backends, "sdpa", Fake(FAULTS["always"][0], "sdpa"))
    monkeypatch.setattr(registry, "_selected", {})
    with pytest.raises(ProofError, match="backend 'sdpa' is wrong"):
        registry.select("auto", PREFILL)


@pytest.mark.parametrize("surroundings", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_the_proof_disturbs_neither_random_state_nor_grad_mode(surroundings):
    backend = Fake(lambda c: torch.rand(1) * 0 + c.sinks)
    with surroundings():
        before, mode = torch.get_rng_state(), (torch.is_grad_enabled(), torch.is_inference_mode_enabled())
        proof.prove(backend, TRAINING)
        assert torch.equal(before, torch.get_rng_state())
        assert mode == (torch.is_grad_enabled(), torch.is_inference_mode_enabled())


def test_the_proof_ignores_autocast():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        proof.prove(Fake(FAULTS["never"][0]), TRAINING)


def test_nothing_runs_while_torch_compile_traces(monkeypatch):
    backend = Fake(FAULTS["always"][0])
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    proof.prove(backend, PREFILL)
    assert backend.calls == 0
    assert not proof.is_proven(backend, PREFILL)


def test_threads_share_one_proof():
    backend = Fake(FAULTS["never"][0])
    threads = [threading.Thread(target=proof.prove, args=(backend, PREFILL)) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert backend.calls == 2


@pytest.mark.parametrize("group", [1, 5, 8])
def test_the_cases_keep_group_head_dims_and_dtype(group):
    needs = Needs("cpu", None, torch.bfloat16, 4 * group, 4, 192, 128, False, PREFILL.features | Feature.DROPOUT)
    for case in proof.cases_of(needs):
        assert case.num_heads // case.num_kv_heads == group
        assert (case.qk_head_dim, case.v_head_dim, case.dtype) == (192, 128, torch.bfloat16)
        assert case.features == PREFILL.features
