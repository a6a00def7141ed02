"""The index of a sharded checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from adapter.checkpoint.errors import IndexFileError, PickleError, ShardError
from adapter.checkpoint.strict_json import parse_object

MAX_INDEX_BYTES = 100_000_000


def read_index(path: Path, *, suffix: str) -> dict[str, list[str]]:
    """File name of every shard to the keys that the index places in it, in the order in which the shards load.

    Args:
        path: the index.
        suffix: what the name of every shard must end with, `.safetensors` or `.bin`.

    Raises:
        IndexFileError: no JSON object, a key twice, no `metadata` map, or a `weight_map` that is no map of names.
        PickleError: an index of safetensors names a file of another kind, which would be read as a pickle.
    """
    index = _parse(path)
    if not isinstance(index.get("metadata"), dict):
        raise IndexFileError(f"{path.name!r} has no 'metadata' map, which transformers reads first", where=str(path))
    shards: dict[str, list[str]] = {}
    for key, name in _weight_map(path, index.get("weight_map")).items():
        shards.setdefault(name, []).append(key)
    for name in shards:
        _check_suffix(path, name, suffix)
    return dict(sorted(shards.items()))


def _parse(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            text = file.read(MAX_INDEX_BYTES + 1)
    except OSError as error:
        raise ShardError(f"the index {path.name!r} cannot be read: {error.strerror}", where=str(path)) from None
    if len(text) > MAX_INDEX_BYTES:
        raise IndexFileError(f"{path.name!r} is larger than 100 MB", where=str(path))
    try:
        return parse_object(text)
    except ValueError as error:
        raise IndexFileError(f"{path.name!r} is no JSON object with unique keys: {error}", where=str(path)) from None


def _weight_map(path: Path, weight_map: Any) -> dict[str, str]:
    if not isinstance(weight_map, dict):
        kind = type(weight_map).__name__
        raise IndexFileError(f"{path.name!r} has a 'weight_map' that is no map but {kind}", where=str(path))
    for key, name in weight_map.items():
        if not isinstance(name, str):
            raise IndexFileError(f"{path.name!r} maps {key!r} to {name!r}, which is no file name", where=str(path))
    if not weight_map:
        raise IndexFileError(f"{path.name!r} has an empty 'weight_map'", where=str(path))
    return weight_map


def _check_suffix(path: Path, name: str, suffix: str) -> None:
    if name.endswith(suffix):
        return
    if suffix == ".safetensors":
        raise PickleError(f"{path.name!r} names {name!r}, which would be read as a pickle", where=str(path))
    raise IndexFileError(f"{path.name!r} names {name!r}, which is no {suffix} file", where=str(path))
