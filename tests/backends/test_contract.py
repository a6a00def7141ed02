"""Every backend of the project on every case that its capability claims, and the contract's own power to tell."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from adapter.backends import contract, registry
from adapter.backends.capability import Feature
from adapter.errors import ProofError


def _grid(names, device):
    return [
        pytest.param(name, case, id=f"{name}: {case}")
        for name in names
        for case in contract.cases(registry.get(name).capability, device)
    ]


@pytest.mark.parametrize(("name", "case"), [*_grid(("sdpa",), "cpu"), *_grid(("eager",), "cpu")[::5]])
def test_contract_on_the_cpu(name, case):
    contract.check(registry.get(name), case)


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "case"), _grid(("sdpa", "eager"), "cuda") if torch.cuda.is_available() else [])
def test_contract_on_the_gpu(name, case):
    contract.check(registry.get(name), case)


@pytest.mark.parametrize("feature", [f for f in Feature if f.value and f is not Feature.DROPOUT])
def test_the_cases_cover_every_feature(feature):
    assert any(feature in case.features for case in contract.cases(registry.get("reference").capability, "cpu"))


class _Wrong:
    """The reference with the call changed before it."""

    name = "wrong"
    capability = registry.get("reference").capability

    def __init__(self, change):
        self.change = change

    def unavailable(self):
        return None

    def attend(self, call):
        return registry.get("reference").attend(self.change(call))


def _sinks(call, change):
    return call if call.sinks is None else replace(call, sinks=change(call.sinks))


WRONG = {
    "drops the sink": lambda c: replace(c, sinks=None),
    "scales the sink": lambda c: _sinks(c, lambda s: s * c.scale),
    "counts the sink twice": lambda c: _sinks(c, lambda s: s + 0.6931),
    "takes the sink of another head": lambda c: _sinks(c, lambda s: s.roll(1, 0 if s.dim() == 1 else 1)),
    "takes the lse for base 2": lambda c: _sinks(c, lambda s: s * 1.4427),
    "gives the sink no gradient": lambda c: _sinks(c, torch.Tensor.detach),
    "sees one token more": lambda c: replace(c, visibility=_wider(c.visibility)),
    "drops the padding": lambda c: replace(c, visibility=c.visibility.with_(padding=None)),
    "drops the documents": lambda c: replace(c, visibility=c.visibility.with_(documents=None)),
    "drops the chunks": lambda c: replace(c, visibility=c.visibility.with_(chunk_size=None)),
    "drops the dense mask": lambda c: replace(c, visibility=c.visibility.with_(dense=None)),
    "drops the bias": lambda c: replace(c, bias=None),
    "drops the softcap": lambda c: replace(c, softcap=None),
    "ignores the offset": lambda c: replace(c, visibility=c.visibility.with_(q_offset=0)),
}


def _wider(v):
    return v if v.left is None else v.with_(left=v.left + 1)


@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_backend_breaks_the_contract(fault):
    backend, failures = _Wrong(WRONG[fault]), 0
    for case in contract.cases(backend.capability, "cpu"):
        if case.dtype is torch.float32 and case.num_heads == 4 and case.qk_head_dim == 64:
            try:
                contract.check(backend, case)
            except ProofError:
                failures += 1
                break
    assert failures


def test_what_is_wrong_is_said():
    case = contract.cases(registry.get("reference").capability, "cpu")[0]
    with pytest.raises(ProofError) as caught:
        contract.check(_Wrong(WRONG["drops the sink"]), case)
    assert "backend 'wrong' is wrong: output is off by" in str(caught.value)
    assert "cpu float32, 4/2 heads of 64/64, q 70 at 0 of kv 70, sink per head, sinks large" in str(caught.value)
