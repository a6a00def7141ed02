"""One key in two files of a checkpoint."""

from __future__ import annotations

from pathlib import Path

from adapter.checkpoint.errors import DuplicateTensorError
from adapter.checkpoint.header import StoredTensor
from adapter.checkpoint.summary import Form

_CHUNK_BYTES = 1 << 20


def check_duplicates(headers: dict[Path, dict[str, StoredTensor]], form: Form) -> tuple[str, ...]:
    """A note for every key that two files hold with the same value.

    Raises:
        DuplicateTensorError: the two differ, or are in pickles, where comparing would mean to load both.
    """
    first: dict[str, Path] = {}
    notes = []
    for path, tensors in headers.items():
        for key in tensors:
            other = first.setdefault(key, path)
            if other is not path:
                if form is Form.PICKLE or not _same(other, headers[other][key], path, tensors[key]):
                    raise DuplicateTensorError(
                        f"{key!r} is stored in {other.name!r} and, with another value, in {path.name!r}",
                        where=f"{path}: {key!r}",
                    )
                notes.append(f"{key!r} is stored in {other.name!r} and in {path.name!r}, with the same value")
    return tuple(notes)


def _same(path: Path, stored: StoredTensor, other_path: Path, other: StoredTensor) -> bool:
    if (stored.dtype, stored.shape) != (other.dtype, other.shape):
        return False
    with path.open("rb") as file, other_path.open("rb") as other_file:
        file.seek(stored.start)
        other_file.seek(other.start)
        left = stored.nbytes
        while left > 0:
            count = min(left, _CHUNK_BYTES)
            if file.read(count) != other_file.read(count):
                return False
            left -= count
    return True
