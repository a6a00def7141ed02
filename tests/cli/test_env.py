"""sinkhold env."""

from __future__ import annotations

import json

import torch

import adapter
from adapter.backends import registry


def test_json_has_versions_machine_and_every_backend(sinkhold):
    facts = json.loads(sinkhold("env", "--json").stdout)
    assert facts["versions"]["sinkhold"] == adapter.__version__
    assert facts["versions"]["torch"] == torch.__version__
    assert list(facts["backends"]) == registry.names()
    assert facts["backends"]["reference"].startswith("available on cpu")


def test_backend_that_cannot_run_says_why(sinkhold, monkeypatch):
    eager = registry.get("eager")
    monkeypatch.setattr(type(eager), "unavailable", lambda self: "it is Sunday")
    lines = sinkhold("env").stdout.splitlines()
    assert any(line.split() == ["eager", "not", "available:", "it", "is", "Sunday"] for line in lines)
