"""Writes safetensors files and indexes byte by byte, so that a test can put any fault into them."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

SINK = "model.layers.0.self_attn.sinks"
QUERY = "model.layers.0.self_attn.q_proj.weight"
SAFE_NAME = "model.safetensors"


def floats(*values: float) -> bytes:
    """Little-endian float32 values."""
    return struct.pack(f"<{len(values)}f", *values)


def entry(shape: Sequence[int], start: int, *, dtype: str = "F32", end: int | None = None) -> dict[str, Any]:
    """One header entry, with the end that the shape implies for float32 unless `end` says otherwise."""
    stop = start + 4 * math.prod(shape) if end is None else end
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}


def header_bytes(header: Mapping[str, Any] | str | bytes) -> bytes:
    """The length prefix and the header; text and bytes are taken as they are."""
    raw = header if isinstance(header, bytes) else header.encode() if isinstance(header, str) else _json(header)
    return struct.pack("<Q", len(raw)) + raw


def write_raw(path: Path, header: Mapping[str, Any] | str | bytes, data: bytes = b"") -> Path:
    """A safetensors file with exactly this header and data, right or wrong."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(header_bytes(header) + data)
    return path


def write_floats(path: Path, tensors: Mapping[str, Sequence[float]]) -> Path:
    """A correct safetensors file of float32 vectors."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for key, values in tensors.items():
        header[key] = entry([len(values)], len(data))
        data += floats(*values)
    return write_raw(path, header, data)


def write_index(folder: Path, weight_map: Any, *, metadata: Any = None, name: str = SAFE_NAME) -> Path:
    """An index over shards, with any weight_map."""
    path = folder / f"{name}.index.json"
    path.write_text(json.dumps({"metadata": {} if metadata is None else metadata, "weight_map": weight_map}))
    return path


def write_shards(folder: Path, shards: Mapping[str, Mapping[str, Sequence[float]]]) -> Path:
    """Correct shards and their index."""
    for name, tensors in shards.items():
        write_floats(folder / name, tensors)
    return write_index(folder, {key: name for name, tensors in shards.items() for key in tensors})


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()
