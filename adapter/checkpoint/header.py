"""The header of a safetensors file, read without touching a tensor."""

from __future__ import annotations

import os
import reprlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adapter.checkpoint.errors import HeaderError, ShardError
from adapter.checkpoint.strict_json import RepeatedKey, parse_object

MAX_HEADER_BYTES = 100_000_000
_PREFIX_BYTES = 8
_LFS_POINTER = b"version "

_DTYPES_BY_BITS = {
    4: ("F4",),
    6: ("F6_E2M3", "F6_E3M2"),
    8: ("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"),
    16: ("F16", "BF16", "I16", "U16"),
    32: ("F32", "I32", "U32"),
    64: ("F64", "I64", "U64", "C64"),
}
BITS = {dtype: bits for bits, dtypes in _DTYPES_BY_BITS.items() for dtype in dtypes}
"""Bits of one element by the format's name of the dtype."""


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a file: `start` and `end` are byte positions in the file (0 and the tensor's bytes in a pickle)."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor in the file."""
        return self.end - self.start


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Key to place of every tensor in the safetensors file `path`.

    Raises:
        HeaderError: the header is truncated, longer than 100 MB, no JSON, holds a key twice, or its tensors overlap,
            leave a hole, or do not end where the file ends.
        ShardError: the file cannot be opened.
    """
    raw, size = _read_raw(path)
    try:
        header = parse_object(raw)
    except RepeatedKey as error:
        raise HeaderError(f"{path.name!r} has a header with a duplicate key: {error}", where=str(path)) from None
    except ValueError as error:
        raise HeaderError(f"{path.name!r} has a header that is no JSON object: {error}", where=str(path)) from None
    _check_metadata(path, header.pop("__metadata__", {}))
    data_start = _PREFIX_BYTES + len(raw)
    tensors = {key: _stored_tensor(path, key, entry, data_start) for key, entry in header.items()}
    _check_layout(path, tensors, data_start, size)
    return tensors


def _read_raw(path: Path) -> tuple[bytes, int]:
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            prefix = file.read(_PREFIX_BYTES)
            length = int.from_bytes(prefix, "little")
            _check_length(path, prefix, length, size)
            return file.read(length), size
    except OSError as error:
        raise ShardError(f"the file {path.name!r} cannot be read: {error.strerror}", where=str(path)) from None


def _check_length(path: Path, prefix: bytes, length: int, size: int) -> None:
    if prefix == _LFS_POINTER:
        fix = "run `git lfs pull` in the checkpoint's folder"
        raise HeaderError(f"{path.name!r} is a Git LFS pointer, not the weights", where=str(path), fix=fix)
    if size < _PREFIX_BYTES:
        raise HeaderError(f"{path.name!r} has {size} bytes: too few for a header", where=str(path))
    if length > MAX_HEADER_BYTES:
        raise HeaderError(f"{path.name!r} announces a header of {length} bytes, over 100 MB", where=str(path))
    if length > size - _PREFIX_BYTES:
        raise HeaderError(
            f"{path.name!r} is truncated: a header of {length} bytes in a file of {size} bytes", where=str(path)
        )


def _check_metadata(path: Path, metadata: Any) -> None:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise HeaderError(f"{path.name!r} has a __metadata__ that is no map of strings", where=str(path))


def _stored_tensor(path: Path, key: str, entry: Any, data_start: int) -> StoredTensor:
    where = f"{path}: {key!r}"
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise HeaderError(f"{path.name!r}: the entry of {key!r} is not dtype, shape, data_offsets", where=where)
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or not _is_counts(shape) or not _is_counts(offsets) or len(offsets) != 2:
        raise HeaderError(f"{path.name!r}: {key!r} has a wrong dtype, shape or data_offsets", where=where)
    start, end = offsets
    # A dtype that is newer than this table is left to the safetensors library.
    if end < start or (dtype in BITS and _elements(shape) * BITS[dtype] != (end - start) * 8):
        raise HeaderError(
            f"{path.name!r}: {key!r} is {dtype} {reprlib.repr(shape)} in {end - start} bytes, which do not fit",
            where=where,
        )
    return StoredTensor(dtype, tuple(shape), data_start + start, data_start + end)


def _is_counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 1 << 63 for item in value)


def _elements(shape: list[int]) -> int:
    # Stops at the first absurd product: a million large factors would take minutes to multiply.
    elements = 0 if 0 in shape else 1
    for length in shape:
        elements *= length
        if elements >= 1 << 63:
            break
    return elements


def _check_layout(path: Path, tensors: dict[str, StoredTensor], data_start: int, size: int) -> None:
    position = data_start
    for key, tensor in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].end)):
        if tensor.start != position:
            fault = "overlaps the tensor before it" if tensor.start < position else "leaves a hole before it"
            raise HeaderError(f"{path.name!r}: {key!r} {fault}", where=f"{path}: {key!r}")
        position = tensor.end
    if position != size:
        raise HeaderError(
            f"{path.name!r} should have {position} bytes by its header and has {size}: truncated or appended to",
            where=str(path),
        )
