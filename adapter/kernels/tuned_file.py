"""The file of tiles tuned on this machine: one for each kind of device, in the user's cache folder."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import json
import logging
import os
import re
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton

from ..errors import BackendError
from .kinds import Kind, kind_of
from .tuning import Tile, capability_of, tile_of

SWITCH = "SINKHOLD_TUNED"
"""The environment variable that, set to 0, leaves every tuned file unread."""
_FIX = "delete that file, or run: sinkhold tune --reset"
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Header:
    """What the rows of a file were measured with.

    Args:
        capability: compute capability, "9.0".
        device: the device's own name.
        triton: version of Triton.
        kernels: digest of the kernels' sources.
    """

    capability: str
    device: str
    triton: str
    kernels: str

    @property
    def is_current(self) -> bool:
        """Whether this Triton and these kernels are still the ones that were measured."""
        return (self.triton, self.kernels) == (triton.__version__, _digest())


@dataclass(frozen=True)
class TunedRow:
    """The fastest tile of one kind of call, its time, and that of the shipped tile; None where that one was dropped."""

    kind: Kind
    tile: Tile
    microseconds: float
    shipped_microseconds: float | None


@dataclass(frozen=True)
class TunedFile:
    """One file; the rows of one that is not current are left unread."""

    path: Path
    header: Header
    rows: tuple[TunedRow, ...]


def folder() -> Path:
    """Where the files lie: sinkhold/tiles in $XDG_CACHE_HOME, or in ~/.cache.

    Raises:
        BackendError: the user has no home folder.
    """
    given = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(given):
        return Path(given, "sinkhold", "tiles")
    home = os.path.expanduser("~")
    if not os.path.isabs(home):
        raise BackendError("there is no home folder to keep tuned tiles in", fix="set XDG_CACHE_HOME to a folder")
    return Path(home, ".cache", "sinkhold", "tiles")


def path_of(device: torch.device) -> Path:
    """The file of a device's kind."""
    header = _header_of(device)
    return folder() / f"{header.capability}-{re.sub('[^A-Za-z0-9]+', '_', header.device)}.json"


def files() -> list[TunedFile]:
    """Every file there is.

    Raises:
        BackendError: one of them cannot be read.
    """
    return [found for path in sorted(folder().glob("*.json")) if (found := read(path)) is not None]


def read(path: Path) -> TunedFile | None:
    """One file; None when it does not exist.

    Raises:
        BackendError: it is there and cannot be read.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        header = Header(**data["header"])
        rows = tuple(_row_of(row) for row in data["rows"]) if header.is_current else ()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        if isinstance(error, PermissionError) and not os.access(path.parent, os.X_OK):
            return None  # a home of somebody else, which holds nothing of this user's
        raise BackendError(f"the tuned tiles in {path} cannot be read: {error.strerror}", fix=_FIX) from error
    except (ValueError, KeyError, TypeError) as error:
        raise BackendError(f"the tuned tiles in {path} cannot be read: {error}", fix=_FIX) from error
    return TunedFile(path, header, rows)


@functools.cache
def tuned_tiles(device: torch.device) -> dict[Kind, Tile]:
    """The tuned tiles of a device, read once for the process; those of another Triton or other kernels are left out.

    Raises:
        BackendError: the file cannot be read.
    """
    if os.environ.get(SWITCH) == "0" or not _has_folder():
        return {}
    found = read(path_of(device))
    if found is None:
        return {}
    if found.header != _header_of(device):
        _log.warning(
            "the tuned tiles in %s were measured with triton %s and other kernels or another device: not used; "
            "run sinkhold tune again",
            found.path,
            found.header.triton,
        )
        return {}
    return {row.kind: row.tile for row in found.rows}


def keep(device: torch.device, rows: Iterable[TunedRow]) -> Path:
    """Put rows into the device's file, beside those of other kinds of calls; other processes may do so too.

    Raises:
        BackendError: the file cannot be read or written.
    """
    path, header = path_of(device), _header_of(device)
    try:
        with _locked():
            old = read(path)
            kept = old.rows if old is not None and old.header == header else ()
            merged = {row.kind: row for row in (*kept, *rows)}
            _replace(path, _text(header, merged.values()))
    except OSError as error:
        raise BackendError(
            f"the tuned tiles cannot be written to {path}: {error.strerror}",
            fix="make that folder writable, or set XDG_CACHE_HOME to one that is",
        ) from error
    return path


def remove() -> list[Path]:
    """Delete every file, readable or not; returns which."""
    if not folder().is_dir():
        return []
    with _locked():
        found = sorted(folder().glob("*.json"))
        for path in found:
            path.unlink()
    return found


@functools.cache
def _header_of(device: torch.device) -> Header:
    major, minor = capability_of(device)
    name = "interpreter" if device.type == "cpu" else torch.cuda.get_device_name(device)
    return Header(f"{major}.{minor}", name, triton.__version__, _digest())


@functools.cache
def _digest() -> str:
    """Of every source in this folder: other kernels have other fastest tiles."""
    found = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        found.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return found.hexdigest()[:16]


def _has_folder() -> bool:
    try:
        return folder().is_dir()
    except (BackendError, PermissionError):
        return False


def _row_of(data: Any) -> TunedRow:
    shipped = data["shipped_microseconds"]
    return TunedRow(
        kind_of(data["kind"]),
        tile_of(data["tile"]),
        float(data["microseconds"]),
        None if shipped is None else float(shipped),
    )


def _text(header: Header, rows: Iterable[TunedRow]) -> str:
    listed = [{**asdict(row), "kind": row.kind.to_json()} for row in rows]
    return json.dumps({"header": asdict(header), "rows": listed}, indent=1) + "\n"


def _replace(path: Path, text: str) -> None:
    number, name = tempfile.mkstemp(dir=path.parent, prefix=f"{path.stem}-", suffix=".tmp")
    try:
        with os.fdopen(number, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


@contextmanager
def _locked() -> Iterator[None]:
    """Held by one process at a time; the lock ends with the process."""
    folder().mkdir(parents=True, exist_ok=True)
    with open(folder() / ".lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
