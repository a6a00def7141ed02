"""Every good form of a checkpoint passes, and what passes is what transformers loads."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from adapter.checkpoint import check_checkpoint, errors
from adapter.checkpoint.summary import Form
from tests.checkpoints import QUERY, SINK, entry, floats, write_floats, write_index, write_raw, write_shards
from tests.families import save

SAFE = "model.safetensors"
ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[torch.nn.Module, Path]:
    folder = tmp_path_factory.mktemp("gpt_oss")
    return save("gpt_oss", folder), folder


def assert_loads_equal(model: torch.nn.Module, folder: Path, **kwargs: object) -> None:
    loaded = AutoModelForCausalLM.from_pretrained(folder, **kwargs)
    state = model.state_dict()
    assert all(torch.equal(value, state[key]) for key, value in loaded.state_dict().items())


def test_single_file(saved: tuple[torch.nn.Module, Path]) -> None:
    model, folder = saved
    summary = check_checkpoint(folder, use_safetensors=None)
    assert summary.form is Form.SAFETENSORS
    assert summary.files == (folder / SAFE,)
    assert set(summary.tensors) == set(model.state_dict())
    assert set(summary.sinks) == {key for key in model.state_dict() if key.endswith(".sinks")}
    assert len(summary.sinks) == 4
    assert summary.tensors[summary.sinks[0]].shape == (4,)
    assert summary.nbytes == sum(value.nbytes for value in model.state_dict().values())
    assert summary.notes == ()


def test_sharded(saved: tuple[torch.nn.Module, Path], tmp_path: Path) -> None:
    model, folder = saved
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    summary = check_checkpoint(tmp_path, use_safetensors=True)
    assert len(summary.files) > 2
    assert set(summary.tensors) == set(check_checkpoint(folder, use_safetensors=None).tensors)
    assert_loads_equal(model, tmp_path)


def test_variant_and_subfolder(saved: tuple[torch.nn.Module, Path], tmp_path: Path) -> None:
    model, _ = saved
    model.save_pretrained(tmp_path / "inner", variant="fp32")
    summary = check_checkpoint(tmp_path, use_safetensors=None, subfolder="inner", variant="fp32")
    assert summary.files == (tmp_path / "inner" / "model.fp32.safetensors",)
    assert_loads_equal(model, tmp_path, subfolder="inner", variant="fp32")


def test_sharded_variant(saved: tuple[torch.nn.Module, Path], tmp_path: Path) -> None:
    model, _ = saved
    model.save_pretrained(tmp_path, variant="fp32", max_shard_size="100KB")
    summary = check_checkpoint(tmp_path, use_safetensors=None, variant="fp32")
    assert len(summary.files) > 2
    assert_loads_equal(model, tmp_path, variant="fp32")


def hub_cache(folder: Path, cache: Path) -> Path:
    """The layout of the hub's cache: files of a snapshot are links to blobs beside the snapshots."""
    repository = cache / "models--owner--tiny"
    snapshot = repository / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for position, file in enumerate(sorted(folder.iterdir())):
        shutil.copy(file, repository / "blobs" / str(position))
        (snapshot / file.name).symlink_to(f"../../blobs/{position}")
    return snapshot


@pytest.mark.parametrize("max_shard_size", ["100KB", "1GB"])
def test_hub_cache(saved: tuple[torch.nn.Module, Path], tmp_path: Path, max_shard_size: str) -> None:
    model, _ = saved
    model.save_pretrained(tmp_path / "plain", max_shard_size=max_shard_size)
    snapshot = hub_cache(tmp_path / "plain", tmp_path / "cache")
    assert len(check_checkpoint(snapshot, use_safetensors=None).sinks) == 4
    alias = tmp_path / "alias"
    alias.symlink_to(snapshot)
    assert len(check_checkpoint(alias, use_safetensors=None).sinks) == 4
    assert_loads_equal(model, snapshot)


@pytest.mark.parametrize("target", ["models--owner--other/blobs/0", "models--owner--tiny-2/blobs/0"])
def test_hub_cache_of_another_repository_is_outside(tmp_path: Path, target: str) -> None:
    write_floats(tmp_path / target, {SINK: [2.0]})
    snapshot = tmp_path / "models--owner--tiny" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (snapshot / SAFE).symlink_to(tmp_path / target)
    with pytest.raises(errors.PathError, match=target):
        check_checkpoint(snapshot, use_safetensors=None)


def test_a_folder_named_like_a_cache_widens_nothing(tmp_path: Path) -> None:
    # Only <repository>/snapshots/... may reach beside itself, not any folder below a name that starts with models--.
    folder = tmp_path / "models--mine" / "checkpoint"
    folder.mkdir(parents=True)
    write_floats(tmp_path / "models--mine" / "x.safetensors", {SINK: [2.0]})
    (folder / SAFE).symlink_to("../x.safetensors")
    with pytest.raises(errors.PathError):
        check_checkpoint(folder, use_safetensors=None)


def test_links_and_folders_inside_the_checkpoint(tmp_path: Path) -> None:
    write_floats(tmp_path / "store" / "a.safetensors", {SINK: [2.0]})
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / SAFE).symlink_to("../store/a.safetensors")
    write_index(tmp_path, {SINK: "store/a.safetensors"})
    assert check_checkpoint(tmp_path, use_safetensors=None).sinks == (SINK,)
    assert check_checkpoint(tmp_path, use_safetensors=None, subfolder="inner").sinks == (SINK,)


def test_minus_infinity_and_huge_sinks_pass(tmp_path: Path) -> None:
    write_floats(tmp_path / SAFE, {SINK: [float("-inf"), 1e30, -1e30, 0.0], QUERY: [float("nan")]})
    assert check_checkpoint(tmp_path, use_safetensors=None).sinks == (SINK,)


def test_sinks_of_other_dtypes_and_sizes_are_not_read(tmp_path: Path) -> None:
    header = {"a.sinks": entry([4], 0, dtype="I8", end=4), "b.sinks": entry([0], 4, end=4)}
    write_raw(tmp_path / SAFE, header | {"c.sinks": entry([8], 4, dtype="FUTURE", end=8)}, floats(1.0, float("nan")))
    assert len(check_checkpoint(tmp_path, use_safetensors=None).sinks) == 3


def test_identical_duplicates_and_unlisted_keys_are_noted(tmp_path: Path) -> None:
    big = [2.0] * 300_000
    write_shards(tmp_path, {ONE: {QUERY: [1.0], SINK: big}, TWO: {SINK: big, "lm_head.weight": [1.0]}})
    write_index(tmp_path, {QUERY: ONE, SINK: TWO})
    first, second, third = check_checkpoint(tmp_path, use_safetensors=None).notes
    assert SINK in first
    assert "lm_head.weight" in second
    assert "with the same value" in third
    assert ONE in third
    assert TWO in third


def test_a_late_difference_between_duplicates_is_found(tmp_path: Path) -> None:
    big = [2.0] * 300_000
    write_shards(tmp_path, {ONE: {QUERY: [1.0], SINK: big}, TWO: {SINK: [*big[:-1], 3.0]}})
    with pytest.raises(errors.DuplicateTensorError, match=r"self_attn\.sinks"):
        check_checkpoint(tmp_path, use_safetensors=None)


@pytest.mark.parametrize("use_safetensors", [None, True, False])
def test_config_may_name_the_weights(tmp_path: Path, use_safetensors: bool | None) -> None:
    write_floats(tmp_path / "other.safetensors", {SINK: [2.0]})
    (tmp_path / "config.json").write_text(json.dumps({"transformers_weights": "other.safetensors"}))
    assert check_checkpoint(tmp_path, use_safetensors=use_safetensors).files == (tmp_path / "other.safetensors",)


def test_peft_adapter(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    write_floats(tmp_path / "adapter_model.safetensors", {"base_model.model.q_proj.lora_A.weight": [1.0]})
    assert check_checkpoint(tmp_path, use_safetensors=None).files == (tmp_path / "adapter_model.safetensors",)


@pytest.mark.parametrize("max_shard_size", ["100KB", "1GB"])
def test_pickles_with_consent(saved: tuple[torch.nn.Module, Path], tmp_path: Path, max_shard_size: str) -> None:
    model, folder = saved
    shutil.copy(folder / "config.json", tmp_path)
    state = model.state_dict()
    if max_shard_size == "1GB":
        torch.save(state, tmp_path / "pytorch_model.bin")
    else:
        halves = {"pytorch_model-1.bin": list(state)[::2], "pytorch_model-2.bin": list(state)[1::2]}
        for name, keys in halves.items():
            torch.save({key: state[key] for key in keys}, tmp_path / name)
        weight_map = {key: name for name, keys in halves.items() for key in keys}
        write_index(tmp_path, weight_map, name="pytorch_model.bin")
    summary = check_checkpoint(tmp_path, use_safetensors=False)
    assert summary.form is Form.PICKLE
    assert set(summary.tensors) == set(state)
    assert len(summary.sinks) == 4
    assert_loads_equal(model, tmp_path, use_safetensors=False)


def test_old_pickles_with_consent(tmp_path: Path) -> None:
    torch.save({SINK: torch.full((2,), 2.0)}, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    assert check_checkpoint(tmp_path, use_safetensors=False).tensors[SINK].shape == (2,)


def test_safetensors_win_over_pickles_unless_told(tmp_path: Path) -> None:
    write_floats(tmp_path / SAFE, {SINK: [2.0]})
    torch.save({SINK: torch.full((1,), 2.0)}, tmp_path / "pytorch_model.bin")
    assert check_checkpoint(tmp_path, use_safetensors=None).form is Form.SAFETENSORS
    assert check_checkpoint(tmp_path, use_safetensors=False).form is Form.PICKLE


def test_files_per_rank_may_share_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("adapter.checkpoint.weights._LOADS_RANK_FILES", True)
    for rank in (1, 2):
        write_floats(tmp_path / f"shard-0000{rank}-model-00001-of-00001.safetensors", {SINK: [float(rank)]})
    summary = check_checkpoint(tmp_path, use_safetensors=None)
    assert summary.form is Form.DISTRIBUTED
    assert len(summary.files) == 2
    monkeypatch.setattr("adapter.checkpoint.weights._LOADS_RANK_FILES", False)
    with pytest.raises(errors.WeightsFileError):
        check_checkpoint(tmp_path, use_safetensors=None)


def test_a_header_may_fill_the_file(tmp_path: Path) -> None:
    write_raw(tmp_path / SAFE, {"empty": entry([0], 0)})
    assert check_checkpoint(tmp_path, use_safetensors=None).tensors["empty"].shape == (0,)
