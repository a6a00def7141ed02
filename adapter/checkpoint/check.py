"""The check of a checkpoint's files, before anything of them is loaded."""

from __future__ import annotations

from pathlib import Path

from adapter.checkpoint.duplicates import check_duplicates
from adapter.checkpoint.errors import ShardKeyError, WeightsFileError
from adapter.checkpoint.header import StoredTensor, read_header
from adapter.checkpoint.index import read_index
from adapter.checkpoint.listing import listing
from adapter.checkpoint.paths import member, require_file
from adapter.checkpoint.pickled import read_pickle
from adapter.checkpoint.sink_names import is_sink_key
from adapter.checkpoint.summary import CheckpointSummary, Form
from adapter.checkpoint.values import check_stored_sinks
from adapter.checkpoint.weights import Weights, find_weights

_SUFFIX = {Form.SAFETENSORS: ".safetensors", Form.PICKLE: ".bin"}
_Headers = dict[Path, dict[str, StoredTensor]]


def check_checkpoint(
    folder: Path, *, use_safetensors: bool | None, subfolder: str = "", variant: str | None = None
) -> CheckpointSummary:
    """Check the local checkpoint in `folder`: paths, index, shards, headers, duplicates and the values of stored sinks.

    The arguments and the choice of files are those of `PreTrainedModel.from_pretrained`. Reads headers, the bytes of
    sinks and those of tensors that are stored twice, nothing else. Files that change between this check and the load
    are not covered.

    Raises:
        CheckpointError: one of its subclasses in `adapter.checkpoint.errors`, naming the file and the key.
    """
    if not folder.is_dir():
        raise WeightsFileError(f"the checkpoint's folder {str(folder)!r} is not there", where=str(folder))
    base = member(folder, folder, subfolder, source="subfolder=") if subfolder else folder
    if not base.is_dir():
        raise WeightsFileError(f"the checkpoint has no subfolder {subfolder!r}", where=str(base))
    weights = find_weights(base, use_safetensors=use_safetensors, variant=variant)
    promised = _promised_keys(folder, base, weights)
    headers = _read_headers(promised, weights.form)
    notes = [note for path, keys in promised.items() for note in _check_promise(path, keys, headers[path])]
    if weights.form is not Form.DISTRIBUTED:
        notes += check_duplicates(headers, weights.form)
    return _summary(folder, weights.form, headers, tuple(notes))


def _promised_keys(folder: Path, base: Path, weights: Weights) -> dict[Path, list[str]]:
    """Every file to load, with the keys that the index (if there is one) places in it."""
    source = "the choice of weights (variant=, or transformers_weights in config.json)"
    files = [member(folder, base, name, source=source) for name in weights.names]
    if not weights.sharded:
        return {require_file(path): [] for path in files}
    index = require_file(files[0])
    shards = read_index(index, suffix=_SUFFIX[weights.form])
    paths = {name: member(folder, base, name, source=f"the index {index.name!r}") for name in shards}
    return {
        require_file(path, holds=f"; the index places {listing(shards[name])} in it"): shards[name]
        for name, path in paths.items()
    }


def _read_headers(files: dict[Path, list[str]], form: Form) -> _Headers:
    read = read_pickle if form is Form.PICKLE else read_header
    return {path: read(path) for path in files}


def _check_promise(path: Path, promised: list[str], tensors: dict[str, StoredTensor]) -> list[str]:
    absent = [key for key in promised if key not in tensors]
    if absent:
        raise ShardKeyError(
            f"the index places {listing(absent)} in {path.name!r}, which does not hold it", where=str(path)
        )
    extra = sorted(tensors.keys() - set(promised)) if promised else []
    return [f"{path.name!r} also holds {listing(extra)}, which the index does not place there"] if extra else []


def _summary(folder: Path, form: Form, headers: _Headers, notes: tuple[str, ...]) -> CheckpointSummary:
    tensors: dict[str, StoredTensor] = {}
    for path, header in headers.items():
        tensors.update(header)
        if form is not Form.PICKLE:
            check_stored_sinks(path, {key: stored for key, stored in header.items() if is_sink_key(key)})
    sinks = tuple(key for key in tensors if is_sink_key(key))
    return CheckpointSummary(folder, form, tuple(headers), tensors, sinks, notes)
