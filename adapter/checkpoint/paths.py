"""Where a checkpoint's files may lie."""

from __future__ import annotations

import os
from pathlib import Path, PureWindowsPath

from adapter.checkpoint.errors import PathError, ShardError


def member(root: Path, base: Path, name: str, *, source: str) -> Path:
    """The path of `name` below `base`, which must stay inside `root` (or the hub cache's folder of that repository).

    Args:
        root: the checkpoint's folder.
        base: `root`, or its subfolder that holds the weights.
        name: a relative file name, as an index or a caller gives it.
        source: who gave the name, for the error.

    Raises:
        PathError: `name` is absolute, climbs with `..`, or a symbolic link leads out of the checkpoint.
    """
    # A Windows path knows both separators and drive letters, so that one test covers both systems.
    parsed = PureWindowsPath(name)
    if not name or not name.isprintable() or parsed.drive or parsed.root or ".." in parsed.parts:
        raise PathError(f"{source} names {name!r}, which is no path inside the checkpoint", where=str(base))
    path = base / name
    real = Path(os.path.realpath(path))
    if not any(real.is_relative_to(allowed) for allowed in _allowed_roots(root)):
        raise PathError(f"{source} names {name!r}, a link that leads out of the checkpoint to {real}", where=str(path))
    return path


def require_file(path: Path, *, holds: str = "") -> Path:
    """`path`, if it is a regular file.

    Raises:
        ShardError: it is absent, a dangling link, a folder or a device.
    """
    if not path.is_file():
        state = "is not a regular file" if os.path.lexists(path) else "is not there"
        raise ShardError(f"the checkpoint's file {path.name!r} {state}{holds}", where=str(path))
    return path


def _allowed_roots(root: Path) -> list[Path]:
    real = Path(os.path.realpath(root))
    return [real, *(p for p in real.parents if _is_hub_repository(p, real))]


def _is_hub_repository(folder: Path, snapshot: Path) -> bool:
    # The hub cache keeps models--owner--name/snapshots/<revision>/<file> as links to models--owner--name/blobs/<hash>.
    return folder.name.startswith("models--") and snapshot.relative_to(folder).parts[0] == "snapshots"
