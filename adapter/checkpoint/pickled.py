"""What a pickled file of weights declares, read on the meta device with weights_only=True: no tensor, no code."""

from __future__ import annotations

import zipfile
from pathlib import Path

import torch
from torch import Tensor

from adapter.checkpoint.errors import PickleContentError
from adapter.checkpoint.header import StoredTensor


def read_pickle(path: Path) -> dict[str, StoredTensor]:
    """Key to shape and dtype of every tensor of the pickle `path`.

    Raises:
        PickleContentError: it holds more than tensors and plain containers, is no map of them, or declares more
            bytes than the file has: a compressed record, or a tensor that repeats a few stored bytes.
    """
    size = path.stat().st_size
    _check_records(path, size)
    tensors = {key: value for key, value in _load_meta(path).items() if isinstance(value, Tensor)}
    for key, tensor in tensors.items():
        _check_tensor(path, str(key), tensor)
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors.values()}
    if sum(storages.values()) > size:
        raise PickleContentError(
            f"{path.name!r} has {size} bytes and declares {sum(storages.values())} bytes of tensors", where=str(path)
        )
    return {str(key): _stored(tensor) for key, tensor in tensors.items()}


def _check_records(path: Path, size: int) -> None:
    if not zipfile.is_zipfile(path):
        return
    try:
        with zipfile.ZipFile(path) as archive:
            unpacked = sum(record.file_size for record in archive.infolist())
    except zipfile.BadZipFile as error:
        raise PickleContentError(f"{path.name!r} is a broken archive: {error}", where=str(path)) from None
    if unpacked > size:
        raise PickleContentError(f"{path.name!r} has {size} bytes and unpacks to {unpacked}", where=str(path))


def _load_meta(path: Path) -> dict[object, object]:
    try:
        content = torch.load(path, map_location="meta", weights_only=True)
    except Exception as error:
        # torch's own text ends in advice to turn weights_only off; its first sentence is what counts.
        reason = str(error).splitlines()[0].split(". ")[0] if str(error) else ""
        raise PickleContentError(
            f"{path.name!r} is no plain pickle of tensors: {type(error).__name__}: {reason}", where=str(path)
        ) from error
    if not isinstance(content, dict):
        kind = type(content).__name__
        raise PickleContentError(f"{path.name!r} holds a {kind}, not a map of names to tensors", where=str(path))
    return content


def _check_tensor(path: Path, key: str, tensor: Tensor) -> None:
    declared, held = tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes()
    if declared > held:
        raise PickleContentError(
            f"{path.name!r}: {key!r} declares {list(tensor.shape)}, {declared} bytes, over {held} stored bytes",
            where=f"{path}: {key!r}",
        )


def _stored(tensor: Tensor) -> StoredTensor:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return StoredTensor(dtype, tuple(tensor.shape), 0, tensor.numel() * tensor.element_size())
