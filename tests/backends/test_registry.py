"""Which backend is taken, why the others are not, and what is imported on the way."""

from __future__ import annotations

import pickle
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import EntryPoint

import pytest
import torch

from adapter.backends import plugins, registry
from adapter.backends.capability import Capability, Feature, Needs
from adapter.errors import BackendError

from .helpers import make

PLAIN = Needs("cpu", None, torch.float32, 4, 2, 16, 16, False, Feature.CAUSAL | Feature.SINK_PER_HEAD)


@pytest.mark.parametrize(
    ("feature", "expected"),
    [(Feature.NONE, "sdpa"), (Feature.SOFTCAP, "eager"), (Feature.DROPOUT, "eager"), (Feature.WEIGHTS, "eager")],
)
def test_auto_takes_the_first_that_refuses_nothing(feature, expected):
    assert registry.select("auto", replace(PLAIN, features=PLAIN.features | feature)).name == expected


def test_a_bias_that_wants_a_gradient_is_not_given_to_sdpa():
    call = make(3, 3, dtype=torch.float32, bias=torch.zeros(1, 4, 3, 3, requires_grad=True))
    needs = Needs.of(call)
    assert Feature.BIAS_GRADIENT in needs.features
    assert registry.refusals("sdpa", needs) == ["no bias gradient"]


def test_a_named_backend_runs_or_says_every_reason():
    needs = replace(PLAIN, features=PLAIN.features | Feature.SOFTCAP | Feature.WEIGHTS)
    with pytest.raises(BackendError) as caught:
        registry.select("sdpa", needs)
    assert "backend 'sdpa' cannot run this layer: no softcap; no weights" in str(caught.value)
    assert "fallback that nobody asked for" in str(caught.value)


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(BackendError) as caught:
        registry.select("sdqa", PLAIN)
    assert "there is no backend 'sdqa'" in str(caught.value)
    assert "auto, triton, sdpa, flex, eager, reference" in str(caught.value)


def test_when_none_can_each_says_why():
    with pytest.raises(BackendError) as caught:
        registry.select("auto", replace(PLAIN, num_heads=5))
    text = str(caught.value)
    for name in ("triton", "sdpa", "flex", "eager", "reference"):
        assert f"    {name}: " in text
    assert "5 query heads over 2 kv heads" in text


def test_explain_gives_a_reason_or_none_for_each_name():
    explained = registry.explain(PLAIN)
    assert list(explained) == registry.names()
    assert explained["sdpa"] == explained["eager"] == []
    assert explained["triton"] == ["device cpu (has cuda)"]


def test_a_capability_gives_all_its_reasons():
    capability = Capability(
        devices=frozenset({"cuda"}),
        dtypes=frozenset({torch.bfloat16}),
        features=Feature.CAUSAL,
        min_compute_capability=(9, 0),
        head_dims=lambda qk, v: f"head dims {qk}/{v}",
        group_size=lambda group: f"{group} heads per kv head",
    )
    needs = replace(PLAIN, compute_capability=(8, 0))
    assert capability.refusals(needs) == [
        "device cpu (has cuda)",
        "dtype float32",
        "compute capability 8.0 (needs 9.0)",
        "no sink per head",
        "2 heads per kv head",
        "head dims 16/16",
    ]


def test_needs_are_read_off_the_call():
    sinks = torch.zeros(2, 4, 1, 1, requires_grad=True)
    padding = torch.ones(2, 9, dtype=torch.bool)
    offset = torch.tensor(8)
    call = make(1, 9, batch=2, right=0, left=3, padding=padding, q_offset=offset, sinks=sinks)
    call = replace(call, softcap=1.0, dropout=0.1, need_weights=True)
    needs = Needs.of(call)
    assert needs.features.names() == [
        *("sink per token", "causal", "window", "padding", "softcap", "dropout", "weights", "device offset"),
        *("backward", "sink gradient"),
    ]
    assert needs.decode
    assert Needs.of(replace(call)) is needs
    with torch.no_grad():
        assert not Needs.of(call).features & (Feature.BACKWARD | Feature.SINK_GRADIENT)


def test_needs_survive_pickling_and_stay_keys():
    hash(PLAIN)
    assert {pickle.loads(pickle.dumps(PLAIN)): 1}[PLAIN] == 1


def test_a_selection_is_made_once(monkeypatch):
    chosen = registry.select("auto", PLAIN)
    monkeypatch.setattr(registry, "_choose", lambda name, needs: pytest.fail("chosen again"))
    assert registry.select("auto", replace(PLAIN)) is chosen


def test_two_backends_of_one_name_are_refused():
    for name in ("sdpa", "triton", "auto"):
        backend = type("B", (), {"name": name, "capability": registry.get("eager").capability})()
        with pytest.raises(BackendError, match="registered already"):
            registry.register(backend)
    with pytest.raises(BackendError, match="not a backend that was registered"):
        registry.unregister("sdpa")


def test_importing_the_backends_imports_none_of_the_optional_ones():
    code = (
        "import sys, torch\n"
        "from adapter.backends import registry\n"
        "from adapter.backends.capability import Feature, Needs\n"
        "needs = Needs('cpu', None, torch.float32, 4, 2, 16, 16, False, Feature.CAUSAL)\n"
        "registry.select('auto', needs), registry.explain(needs)\n"
        "bad = {'flash_attn', 'flashinfer', 'adapter.backends.triton', 'adapter.backends.flex'}\n"
        "print(sorted(bad & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


class Outside:
    """A backend of another package."""

    name = "outside"
    capability = registry.get("eager").capability

    def unavailable(self):
        return None

    def attend(self, call):
        return registry.get("eager").attend(call)


@pytest.fixture
def entry_point(monkeypatch):
    def install(target, name="outside"):
        entry = EntryPoint(name, target, plugins.GROUP)
        monkeypatch.setattr(plugins, "_found", lambda: {name: entry})
        monkeypatch.setattr(registry, "_backends", dict(registry._backends))
        monkeypatch.setattr(registry, "_selected", {})

    return install


def test_a_backend_of_another_package_is_used_when_named_and_only_then(entry_point):
    entry_point(f"{__name__}:Outside")
    assert "outside" in registry.names()
    assert registry.select("auto", PLAIN).name == "sdpa"
    assert registry.select("outside", PLAIN).name == "outside"
    assert plugins.listing() == [plugins.Plugin("outside", f"{__name__}:Outside", "unknown", "unknown")]


@pytest.mark.parametrize(
    ("target", "text"),
    [
        ("no_such_module:X", "backend 'outside' cannot be loaded: ModuleNotFoundError"),
        ("adapter.backends.eager:BACKEND", "it calls itself 'eager'"),
        ("adapter.backends.call:Visibility", "cannot be loaded: TypeError"),
        ("math:pi", "it lacks name, capability, unavailable, attend"),
    ],
)
def test_an_entry_point_that_is_no_backend_says_where_it_comes_from(entry_point, target, text):
    entry_point(target)
    with pytest.raises(BackendError) as caught:
        registry.get("outside")
    assert text in str(caught.value)
    assert f"unknown unknown, {target}" in str(caught.value)
    assert text in "; ".join(registry.explain(PLAIN)["outside"])


def test_sdpa_takes_double_on_the_cpu_only():
    needs = Needs("cuda", (9, 0), torch.float64, 4, 2, 64, 64, False, Feature.CAUSAL)
    assert "float64 on cuda" in registry.refusals("sdpa", needs)
    assert not registry.refusals("sdpa", replace(needs, device="cpu", compute_capability=None))


def test_sdpa_trains_under_a_mask_on_the_cpu_only():
    needs = Needs("cuda", (9, 0), torch.bfloat16, 4, 2, 64, 64, False, Feature.WINDOW | Feature.BACKWARD)
    assert "backward under a mask on cuda" in registry.refusals("sdpa", needs)
    assert not registry.refusals("sdpa", replace(needs, features=Feature.CAUSAL | Feature.BACKWARD))
    assert not registry.refusals("sdpa", replace(needs, device="cpu", compute_capability=None))
