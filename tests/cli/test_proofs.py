"""demo, selftest and verify: they pass on a right adapter, and fail when a sink is lost or a probe fails."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from adapter.backends import eager, registry
from adapter.cli.tiny import entries


@pytest.fixture
def deaf(monkeypatch):
    """An eager backend that ignores the sink; `eager` needs no proof, so nothing but the comparison can notice."""
    attend = eager.Eager.attend
    monkeypatch.setattr(eager.Eager, "attend", lambda self, call: attend(self, replace(call, sinks=None)))
    return registry.get("eager").name


def test_demo_shows_three_models_and_passes(sinkhold, tmp_path):
    result = sinkhold("demo", "--keep", tmp_path)
    assert result.exit_code == 0, result.output
    installed = [tiny for tiny in entries() if tiny.installed]
    assert all(f" {tiny.title} " in result.stdout for tiny in installed)
    assert f"{len(installed)} of {len(installed)} models are right" in result.stdout
    assert result.stdout.count("eager, sinks dropped") == len(installed)
    assert result.stderr == ""
    assert (tmp_path / "gpt-oss" / "model.safetensors").is_file()


def test_selftest_passes(sinkhold):
    result = sinkhold("selftest")
    assert result.exit_code == 0, result.output
    assert [line[:4] for line in result.stdout.splitlines()[:-1]] == ["ok  "] * 4
    assert result.stdout.endswith("the installation works\n")


def test_selftest_fails_on_a_backend_that_ignores_the_sink(sinkhold, deaf):
    result = sinkhold("selftest", "--backend", deaf)
    assert result.exit_code == 1
    assert "FAIL gpt-oss equals transformers' eager: off by" in result.stdout


def test_verify_passes_as_text_and_json(sinkhold, checkpoint):
    assert sinkhold("verify", checkpoint).exit_code == 0
    result = sinkhold("verify", checkpoint, "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)


def test_verify_exits_with_1_when_a_probe_fails(sinkhold, checkpoint, deaf):
    assert sinkhold("verify", checkpoint, "--backend", deaf).exit_code == 1
