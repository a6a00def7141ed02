"""Hostile checkpoints: each is refused with its code, its file and its key, before a tensor is read."""

from __future__ import annotations

import json
import os
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from packaging.version import Version

from adapter.checkpoint import check_checkpoint, errors
from adapter.errors import CheckpointError
from tests.checkpoints import (
    QUERY,
    SINK,
    entry,
    floats,
    write_floats,
    write_index,
    write_raw,
    write_shards,
)

Case = tuple[Callable[[Path], object], type[CheckpointError], tuple[str, ...]]
SAFE = "model.safetensors"
BIN = "pytorch_model.bin"
ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.fixture(autouse=True)
def nothing_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refused checkpoint must not have been read by safetensors, nor by torch.load other than on meta."""
    real_load = torch.load

    def load(*args: object, **kwargs: object) -> object:
        assert kwargs["map_location"] == "meta"
        assert kwargs["weights_only"] is True
        return real_load(*args, **kwargs)

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a tensor was loaded")

    monkeypatch.setattr(torch, "load", load)
    monkeypatch.setattr("safetensors.safe_open", refuse)
    monkeypatch.setattr("transformers.modeling_utils.safe_open", refuse)


def outside(folder: Path) -> Path:
    return write_floats(folder.parent / "outside" / "x.safetensors", {SINK: [2.0, 2.0]})


def index_naming(name: object) -> Callable[[Path], object]:
    def build(folder: Path) -> None:
        outside(folder)
        write_index(folder, {SINK: name})

    return build


def absolute_path(folder: Path) -> None:
    write_index(folder, {SINK: str(outside(folder))})


def linked_shard(folder: Path) -> None:
    (folder / ONE).symlink_to(outside(folder))
    write_index(folder, {SINK: ONE})


def linked_file(folder: Path) -> None:
    (folder / SAFE).symlink_to(outside(folder))


def linked_index(folder: Path) -> None:
    target = write_index(outside(folder).parent, {SINK: "x.safetensors"})
    (folder / f"{SAFE}.index.json").symlink_to(target)


def config_naming(name: object) -> Callable[[Path], object]:
    def build(folder: Path) -> None:
        outside(folder)
        (folder / "config.json").write_text(json.dumps({"transformers_weights": name}))

    return build


def index_text(text: str | bytes) -> Callable[[Path], object]:
    raw = text.encode() if isinstance(text, str) else text
    return lambda folder: (folder / f"{SAFE}.index.json").write_bytes(raw)


def index_of(weight_map: object, metadata: object = None) -> Callable[[Path], object]:
    return lambda folder: write_index(folder, weight_map, metadata=metadata)


def huge_index(folder: Path) -> None:
    with (folder / f"{SAFE}.index.json").open("wb") as file:
        file.truncate(100_000_001)


def absent_shard(folder: Path) -> None:
    write_shards(folder, {ONE: {QUERY: [1.0]}, TWO: {SINK: [2.0, 2.0]}})
    (folder / TWO).unlink()


def dangling_shard(folder: Path) -> None:
    absent_shard(folder)
    (folder / TWO).symlink_to(folder / "gone")


def folder_as_shard(folder: Path) -> None:
    absent_shard(folder)
    (folder / TWO).mkdir()


def pipe_as_weights(folder: Path) -> None:
    os.mkfifo(folder / SAFE)


def key_not_in_shard(folder: Path) -> None:
    write_shards(folder, {ONE: {QUERY: [1.0]}, TWO: {"lm_head.weight": [1.0]}})
    write_index(folder, {QUERY: ONE, SINK: TWO, "lm_head.weight": TWO})


def two_values(folder: Path) -> None:
    write_shards(folder, {ONE: {QUERY: [1.0], SINK: [2.0, 2.0]}, TWO: {SINK: [2.0, 3.0]}})


def two_shapes(folder: Path) -> None:
    write_shards(folder, {ONE: {QUERY: [1.0], SINK: [2.0, 2.0]}, TWO: {SINK: [2.0, 2.0, 2.0]}})


def header_of(header: object, data: bytes = floats(2.0, 2.0)) -> Callable[[Path], object]:
    return lambda folder: write_raw(folder / SAFE, header, data)  # type: ignore[arg-type]


def duplicate_header_key(folder: Path) -> None:
    one = json.dumps(entry([2], 0))
    write_raw(folder / SAFE, f'{{"{SINK}": {one}, "{SINK}": {one}}}', floats(2.0, 2.0))


def raw_file(content: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / SAFE).write_bytes(content)


def truncated(folder: Path) -> None:
    path = write_floats(folder / SAFE, {SINK: [2.0, 2.0]})
    path.write_bytes(path.read_bytes()[:-1])


def appended(folder: Path) -> None:
    path = write_floats(folder / SAFE, {SINK: [2.0, 2.0]})
    path.write_bytes(path.read_bytes() + b"!")


def sinks_of(*values: float) -> Callable[[Path], object]:
    return lambda folder: write_floats(folder / SAFE, {QUERY: [1.0], SINK: values})


def half_nan(folder: Path) -> None:
    write_raw(folder / SAFE, {SINK: entry([2], 0, dtype="BF16", end=4)}, b"\x00\x40\xc0\x7f")


def plain_pickle(folder: Path) -> None:
    torch.save({SINK: torch.full((2,), 2.0)}, folder / BIN)


def pickle_index(folder: Path) -> None:
    write_index(folder, {SINK: "pytorch_model-1.bin"}, name=BIN)


INDEX, SHARD, HEADER = errors.IndexFileError, errors.ShardError, errors.HeaderError
HOSTILE: dict[str, Case] = {
    "index climbs": (index_naming("../outside/x.safetensors"), errors.PathError, ("../outside/x.safetensors",)),
    "index climbs inside": (index_naming("a/../../outside/x.safetensors"), errors.PathError, ("a/../..",)),
    "index climbs with backslashes": (index_naming("..\\outside\\x.safetensors"), errors.PathError, ("outside",)),
    "index with an absolute path": (absolute_path, errors.PathError, ("outside/x.safetensors",)),
    "index with a drive": (index_naming("C:x.safetensors"), errors.PathError, ("C:x.safetensors",)),
    "index with an unprintable name": (index_naming("x\ud800\0.safetensors"), errors.PathError, ("\\ud800",)),
    "shard links out": (linked_shard, errors.PathError, (ONE, "outside/x.safetensors")),
    "weights link out": (linked_file, errors.PathError, (SAFE, "outside/x.safetensors")),
    "index links out": (linked_index, errors.PathError, ("model.safetensors.index.json", "outside")),
    "config names a file outside": (config_naming("../outside/x.safetensors"), errors.PathError, ("../outside",)),
    "config names a pickle": (config_naming("adapter_model.bin"), errors.PickleError, ("adapter_model.bin",)),
    "index is no JSON": (index_text("{"), INDEX, ("model.safetensors.index.json",)),
    "index is no text": (index_text(b"\xff\xfe"), INDEX, ("model.safetensors.index.json",)),
    "index is a list": (index_text("[]"), INDEX, ("it is a list",)),
    "index is nested": (index_text("[" * 200_000), INDEX, ("nested too deeply",)),
    "index with a huge number": (index_text('{"metadata": ' + "9" * 5000 + "}"), INDEX, ("index.json",)),
    "index is huge": (huge_index, INDEX, ("larger than 100 MB",)),
    "index with a duplicate key": (
        index_text(f'{{"metadata": {{}}, "weight_map": {{"{SINK}": "{ONE}", "{SINK}": "{TWO}"}}}}'),
        INDEX,
        (SINK, "twice"),
    ),
    "weight_map is a list": (index_of([SINK]), INDEX, ("no map but list",)),
    "weight_map is absent": (index_text('{"metadata": {}}'), INDEX, ("no map but NoneType",)),
    "weight_map is empty": (index_of({}), INDEX, ("empty 'weight_map'",)),
    "weight_map names a number": (index_of({SINK: 1}), INDEX, (SINK,)),
    "no metadata": (index_text(f'{{"weight_map": {{"{SINK}": "{ONE}"}}}}'), INDEX, ("'metadata'",)),
    "metadata is a list": (index_of({SINK: ONE}, ["x"]), INDEX, ("'metadata'",)),
    "pickle smuggled into an index": (index_of({SINK: "x.bin"}), errors.PickleError, ("x.bin",)),
    "shard absent": (absent_shard, SHARD, (TWO, SINK, "is not there")),
    "shard is a dangling link": (dangling_shard, SHARD, (TWO, SINK, "not a regular file")),
    "shard is a folder": (folder_as_shard, SHARD, (TWO, SINK, "not a regular file")),
    "weights are a pipe": (pipe_as_weights, SHARD, (SAFE, "not a regular file")),
    "key not in its shard": (key_not_in_shard, errors.ShardKeyError, (TWO, SINK)),
    "one key, two values": (two_values, errors.DuplicateTensorError, (ONE, TWO, SINK)),
    "one key, two shapes": (two_shapes, errors.DuplicateTensorError, (ONE, TWO, SINK)),
    "duplicate header key": (duplicate_header_key, HEADER, (SAFE, SINK, "duplicate")),
    "empty file": (raw_file(b""), HEADER, (SAFE, "0 bytes: too few")),
    "LFS pointer": (raw_file(b"version https://git-lfs.github.com/spec/v1\n"), HEADER, (SAFE, "git lfs pull")),
    "huge header": (raw_file((100_000_001).to_bytes(8, "little")), HEADER, (SAFE, "over 100 MB")),
    "truncated header": (raw_file((100).to_bytes(8, "little") + b"{}"), HEADER, (SAFE, "truncated")),
    "header is no JSON": (header_of("{nonsense}"), HEADER, (SAFE,)),
    "header is nested": (header_of('{"a": ' + "[" * 200_000), HEADER, (SAFE, "nested")),
    "header with NaN": (header_of(f'{{"{SINK}": NaN}}'), HEADER, (SAFE, "NaN")),
    "metadata of numbers": (header_of({"__metadata__": {"a": 1}}), HEADER, (SAFE, "__metadata__")),
    "metadata of no map": (header_of({"__metadata__": 1}), HEADER, (SAFE, "__metadata__")),
    "entry is a list": (header_of({SINK: []}), HEADER, (SAFE, SINK)),
    "entry with a further field": (header_of({SINK: entry([2], 0) | {"x": 1}}), HEADER, (SAFE, SINK)),
    "dtype is a number": (header_of({SINK: entry([2], 0) | {"dtype": 1}}), HEADER, (SAFE, SINK)),
    "shape is negative": (header_of({SINK: entry([2], 0) | {"shape": [-2]}}), HEADER, (SAFE, SINK)),
    "shape is boolean": (header_of({SINK: entry([2], 0) | {"shape": [True, 2]}}), HEADER, (SAFE, SINK)),
    "three offsets": (header_of({SINK: entry([2], 0) | {"data_offsets": [0, 4, 8]}}), HEADER, (SAFE, SINK)),
    "offsets run backwards": (header_of({SINK: entry([2], 8, dtype="NEW", end=0)}), HEADER, (SAFE, SINK)),
    "shape overflows": (header_of({SINK: entry([2**62, 2**62], 0, end=8)}), HEADER, (SAFE, SINK)),
    "shape of a million factors": (header_of({SINK: entry([2**62] * 99_999, 0, end=8)}), HEADER, (SAFE, SINK)),
    "shape and bytes disagree": (header_of({SINK: entry([3], 0, end=8)}), HEADER, (SAFE, SINK, "8 bytes")),
    "declared beyond the file": (header_of({SINK: entry([1000], 0)}), HEADER, (SAFE, "4104 bytes", "truncated")),
    "overlap": (header_of({QUERY: entry([2], 0), SINK: entry([1], 4)}), HEADER, (SAFE, SINK, "overlaps")),
    "hole": (header_of({QUERY: entry([1], 0), SINK: entry([1], 8)}, floats(1, 1, 1)), HEADER, (SAFE, SINK, "hole")),
    "truncated data": (truncated, HEADER, (SAFE, "truncated")),
    "data appended": (appended, HEADER, (SAFE, "appended")),
    "NaN sink": (sinks_of(2.0, float("nan")), errors.SinkValueError, (SAFE, SINK, "1 NaN in 2 values")),
    "infinite sink": (sinks_of(float("inf")), errors.SinkValueError, (SAFE, SINK, "1 +inf")),
    "bf16 NaN sink": (half_nan, errors.SinkValueError, (SAFE, SINK, "1 NaN")),
    "pickle without consent": (plain_pickle, errors.PickleError, (BIN, "use_safetensors=False", "weights_only=True")),
    "pickle index without consent": (pickle_index, errors.PickleError, ("pytorch_model.bin.index.json",)),
    "nothing": (lambda folder: None, errors.WeightsFileError, (SAFE,)),
    "a broken config and nothing": (
        lambda folder: (folder / "config.json").write_text("{"),
        errors.WeightsFileError,
        (SAFE,),
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_checkpoint_is_refused(name: str, tmp_path: Path) -> None:
    build, kind, texts = HOSTILE[name]
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    build(folder)
    with pytest.raises(CheckpointError) as caught:
        check_checkpoint(folder, use_safetensors=None)
    assert type(caught.value) is kind
    for text in (f"[{kind.code}]", "where:", "why:", "fix:", str(folder), *texts):
        assert text in str(caught.value)


class Command:
    def __reduce__(self) -> tuple[object, ...]:
        return os.system, ("touch pwned",)


def repeated_bytes(folder: Path) -> None:
    torch.save({SINK: torch.zeros(1).as_strided((1 << 34,), (0,))}, folder / BIN)


def system_call(folder: Path) -> None:
    (folder / BIN).write_bytes(pickle.dumps({SINK: Command()}, protocol=2))


def compressed(folder: Path) -> None:
    plain = folder / "plain"
    torch.save({SINK: torch.zeros(1 << 18)}, plain)
    with zipfile.ZipFile(plain) as source, zipfile.ZipFile(folder / BIN, "w", zipfile.ZIP_DEFLATED) as target:
        for record in source.infolist():
            target.writestr(record.filename, source.read(record))


def shrunk_record(folder: Path) -> None:
    plain = folder / "plain"
    torch.save({SINK: torch.zeros(1 << 18)}, plain)
    with zipfile.ZipFile(plain) as source, zipfile.ZipFile(folder / BIN, "w") as target:
        for record in source.infolist():
            content = source.read(record)
            target.writestr(record.filename, content[:4] if "/data/" in record.filename else content)


def broken_archive(folder: Path) -> None:
    plain_pickle(folder)
    content = bytearray((folder / BIN).read_bytes())
    content[content.rindex(b"PK\x01\x02") :][:4] = b""
    position = content.index(b"PK\x01\x02")
    content[position : position + 4] = b"XXXX"
    (folder / BIN).write_bytes(bytes(content))


def pickled_list(folder: Path) -> None:
    torch.save([torch.zeros(1)], folder / BIN)


def two_pickles(folder: Path) -> None:
    for name in ("pytorch_model-1.bin", "pytorch_model-2.bin"):
        torch.save({SINK: torch.full((2,), 2.0)}, folder / name)
    write_index(folder, {SINK: "pytorch_model-1.bin", QUERY: "pytorch_model-2.bin"}, name=BIN)
    torch.save({SINK: torch.full((2,), 2.0), QUERY: torch.zeros(1)}, folder / "pytorch_model-2.bin")


CONTENT = errors.PickleContentError
HOSTILE_PICKLES: dict[str, Case] = {
    "64 GiB over four bytes": (repeated_bytes, CONTENT, (BIN, SINK, "68719476736 bytes, over 4 stored bytes")),
    "a system call": (system_call, CONTENT, (BIN, "UnpicklingError")),
    "an empty file": (lambda folder: (folder / BIN).touch(), CONTENT, (BIN, "EOFError")),
    "a compressed record": (compressed, CONTENT, (BIN, "unpacks to")),
    "a record that is too short": (shrunk_record, CONTENT, (BIN, "1048576 bytes")),
    "a broken archive": (broken_archive, CONTENT, (BIN,)),
    "a list": (pickled_list, CONTENT, (BIN, "holds a list")),
    "one key in two pickles": (two_pickles, errors.DuplicateTensorError, ("pytorch_model-2.bin", SINK)),
    "an index that climbs": (
        lambda folder: write_index(folder, {SINK: "../x.bin"}, name=BIN),
        errors.PathError,
        ("../x.bin",),
    ),
    "an index of something else": (
        lambda folder: write_index(folder, {SINK: "x.txt"}, name=BIN),
        INDEX,
        ("x.txt", "no .bin file"),
    ),
    "no pickle": (lambda folder: write_floats(folder / SAFE, {SINK: [2.0]}), errors.WeightsFileError, (BIN,)),
}


@pytest.mark.parametrize("name", HOSTILE_PICKLES)
def test_hostile_pickle_is_refused_even_with_consent(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build, kind, texts = HOSTILE_PICKLES[name]
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    monkeypatch.chdir(folder)
    build(folder)
    with pytest.raises(CheckpointError) as caught:
        check_checkpoint(folder, use_safetensors=False)
    assert type(caught.value) is kind
    for text in (f"[{kind.code}]", "where:", "why:", "fix:", str(folder), *texts):
        assert text in str(caught.value)
    assert not (folder / "pwned").exists()


@pytest.mark.parametrize("subfolder", ["../outside", "/", "gone", "link"])
def test_subfolder_must_lie_in_the_checkpoint(subfolder: str, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "link").symlink_to(outside(folder).parent)
    with pytest.raises(CheckpointError, match="checkpoint") as caught:
        check_checkpoint(folder, use_safetensors=None, subfolder=subfolder)
    assert type(caught.value) is (errors.WeightsFileError if subfolder == "gone" else errors.PathError)


def test_variant_must_lie_in_the_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "model.").mkdir()
    write_floats(tmp_path / "x.safetensors", {SINK: [2.0]})
    with pytest.raises(errors.PathError, match=r"\.\./\.\./x"):
        check_checkpoint(folder, use_safetensors=True, variant="/../../x")


def test_folder_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(errors.WeightsFileError, match=r"folder .*gone.* is not there"):
        check_checkpoint(tmp_path / "gone", use_safetensors=None)


def test_unreadable_files_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_shards(tmp_path, {ONE: {SINK: [2.0]}})
    real_open = Path.open

    def deny(name: str) -> None:
        def opened(self: Path, *args: object, **kwargs: object) -> object:
            if self.name == name:
                raise PermissionError(13, "Permission denied")
            return real_open(self, *args, **kwargs)  # type: ignore[arg-type]

        monkeypatch.setattr(Path, "open", opened)

    for name in (ONE, f"{SAFE}.index.json"):
        deny(name)
        with pytest.raises(errors.ShardError, match="Permission denied") as caught:
            check_checkpoint(tmp_path, use_safetensors=None)
        assert name in str(caught.value)


def test_a_pickle_map_of_any_kind_passes(tmp_path: Path) -> None:
    torch.save(OrderedDict({SINK: torch.full((2,), 2.0), "steps": 3}), tmp_path / BIN)
    summary = check_checkpoint(tmp_path, use_safetensors=False)
    assert summary.form.value == "pickle"
    assert list(summary.tensors) == [SINK]
    assert summary.nbytes == 8


def test_every_kind_of_fault_has_its_own_code() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, CheckpointError)]
    assert len({kind.code for kind in kinds}) == len(kinds) == 14
    assert all(kind.default_why and kind.default_fix for kind in kinds)


@pytest.mark.skipif(
    Version(transformers.__version__) >= Version("5.25"), reason="transformers refuses it too since 5.25"
)
def test_plain_transformers_loads_what_is_refused_here(tmp_path: Path) -> None:
    # The reason for this guard in the older versions that are supported.
    from transformers.utils.hub import get_checkpoint_shard_files

    folder = tmp_path / "checkpoint"
    folder.mkdir()
    index = index_naming("../outside/x.safetensors")(folder) or folder / f"{SAFE}.index.json"
    files, _ = get_checkpoint_shard_files(str(folder), str(index))
    assert Path(files[0]).resolve() == (tmp_path / "outside" / "x.safetensors"), transformers.__version__
