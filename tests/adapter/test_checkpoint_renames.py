"""Names on disk that a model's conversions turn into sinks."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from adapter.checkpoint import check_checkpoint, check_renamed_sinks, errors
from tests.families import save

ON_DISK = "model.layers.1.self_attn.attention_sink_bias"
IN_MODEL = "model.layers.1.self_attn.sinks"


def test_names_on_disk_become_names_in_the_model(tmp_path: Path) -> None:
    model = save("mimo_v2_flash", tmp_path)
    renamed = check_renamed_sinks(check_checkpoint(tmp_path, use_safetensors=None), model)
    assert renamed[ON_DISK] == IN_MODEL
    assert set(renamed.values()) == {key for key in model.state_dict() if key.endswith(".sinks")}


def test_a_callers_mapping_comes_first(tmp_path: Path) -> None:
    model = save("gpt_oss", tmp_path)
    summary = check_checkpoint(tmp_path, use_safetensors=None)
    renamed = check_renamed_sinks(summary, model, key_mapping={"^model": "inner"})
    assert renamed[IN_MODEL] == IN_MODEL.replace("model", "inner", 1)


def test_one_sink_under_two_names_is_refused(tmp_path: Path) -> None:
    model = save("mimo_v2_flash", tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    save_file(state | {IN_MODEL: state[ON_DISK] + 5}, tmp_path / "model.safetensors", {"format": "pt"})
    loaded = type(model).from_pretrained(tmp_path)
    assert (loaded.get_parameter(IN_MODEL) == state[ON_DISK]).all(), "transformers has begun to say something"
    with pytest.raises(errors.DuplicateTensorError) as caught:
        check_renamed_sinks(check_checkpoint(tmp_path, use_safetensors=None), loaded)
    for text in ("[SINK-406]", ON_DISK, IN_MODEL, "spelling"):
        assert text in str(caught.value)
