"""sinkhold inspect: from the configuration alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from adapter.checkpoint.errors import SinkValueError
from tests.checkpoints import write_floats


def test_text_says_what_each_layer_passes_and_what_runs_it(sinkhold, checkpoint):
    result = sinkhold("inspect", checkpoint)
    assert result.exit_code == 0
    assert "4 attention layers, 4 with a sink, backend='auto'" in result.stdout
    assert "model.layers.{0,2}.self_attn" in result.stdout
    assert "scale    self.scaling -> 0.25" in result.stdout
    assert "sink     self.sinks -> per_head, [4] float32 on meta" in result.stdout
    assert "window   self.sliding_window -> 8" in result.stdout
    assert "sink tensors: 4 (F32)" in result.stdout


def test_json_has_one_entry_for_each_layer(sinkhold, checkpoint):
    facts = json.loads(sinkhold("inspect", checkpoint, "--json").stdout)
    assert [layer["path"] for layer in facts["layers"]] == [f"model.layers.{i}.self_attn" for i in range(4)]
    layer = facts["layers"][0]
    file, _, line = layer["where"].rpartition(":")
    assert "interface(" in Path(file).read_text().splitlines()[int(line) - 1]
    assert (layer["scale"], layer["sink_shape"], layer["window"]) == (0.25, [4], 8)
    assert layer["measured"] is False
    assert set(layer["backends"]) == {"prefill", "decode"}
    assert facts["checkpoint"]["sinks"]["model.layers.3.self_attn.sinks"] == {"dtype": "F32", "shape": [4]}


def test_backend_that_is_asked_for_is_the_one_that_is_shown(sinkhold, checkpoint):
    facts = json.loads(sinkhold("inspect", checkpoint, "--json", "--backend", "eager").stdout)
    assert {tuple(layer["backends"].values()) for layer in facts["layers"]} == {("eager", "eager")}


def test_no_weights_are_needed(sinkhold, checkpoint, tmp_path):
    shutil.copy(checkpoint / "config.json", tmp_path)
    result = sinkhold("inspect", tmp_path)
    assert result.exit_code == 0
    assert "no safetensors here; their sinks were not looked at" in result.stdout


def test_no_parameter_is_materialised(sinkhold, checkpoint, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("weights were loaded")

    monkeypatch.setattr("transformers.PreTrainedModel.from_pretrained", refuse)
    monkeypatch.setattr("safetensors.torch.load_file", refuse)
    before = torch.get_default_device()
    assert sinkhold("inspect", checkpoint).exit_code == 0
    assert torch.get_default_device() == before


def test_stored_sink_of_nan_is_refused(sinkhold, checkpoint, tmp_path):
    shutil.copy(checkpoint / "config.json", tmp_path)
    write_floats(tmp_path / "model.safetensors", {"model.layers.0.self_attn.sinks": [0.0, float("nan"), 0.0, 0.0]})
    result = sinkhold("inspect", tmp_path)
    assert result.exit_code == 3
    assert result.stderr.startswith(f"[{SinkValueError.code}]")


@pytest.mark.parametrize("architectures", [None, ["NoSuchModel"]])
def test_architecture_is_never_guessed(sinkhold, checkpoint, tmp_path, architectures):
    config = json.loads((checkpoint / "config.json").read_text())
    config["architectures"] = architectures
    (tmp_path / "config.json").write_text(json.dumps(config))
    result = sinkhold("inspect", tmp_path)
    assert result.exit_code == 3
    assert "names no architecture" in result.stderr or "'NoSuchModel', which transformers" in result.stderr
    assert "which class to build is not a thing to guess" in result.stderr


def test_unknown_backend_is_a_usage_error_that_lists_the_known_ones(sinkhold, checkpoint):
    result = sinkhold("inspect", checkpoint, "--backend", "fastest")
    assert result.exit_code == 2
    assert "there is no backend 'fastest'" in result.stderr
    assert "reference" in result.stderr
