"""The values that a sink may have: any number and -inf; NaN and +inf are refused."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from adapter.checkpoint.errors import SinkValueError
from adapter.checkpoint.header import StoredTensor

MAX_SINK_BYTES = 1 << 24
"""A stored tensor larger than this is no per-head sink and is not read ahead."""

_FLOATS = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64}


def check_sink_values(named_sinks: Iterable[tuple[str, Tensor]]) -> None:
    """Refuse sinks that are NaN or +inf; -inf (no sink) and any finite number pass. Meta tensors are skipped.

    Args:
        named_sinks: name and tensor [num_heads]; any shape and floating dtype is accepted. Each tensor off the CPU
            costs a synchronisation.

    Raises:
        SinkValueError: names the first such sink and counts its values.
    """
    for name, sink in named_sinks:
        if not sink.is_meta:
            _check(name, sink.detach(), where=name)


def check_stored_sinks(path: Path, sinks: Mapping[str, StoredTensor]) -> None:
    """Refuse sinks of the safetensors file `path` that are NaN or +inf, reading their bytes alone.

    Raises:
        SinkValueError: names file and key.
    """
    with path.open("rb") as file:
        for key, stored in sinks.items():
            dtype = _FLOATS.get(stored.dtype)
            if dtype is None or not 0 < stored.nbytes <= MAX_SINK_BYTES:
                continue
            file.seek(stored.start)
            values = torch.frombuffer(bytearray(file.read(stored.nbytes)), dtype=dtype)
            _check(key, values, where=f"{path}: {key!r}")


def _check(name: str, sink: Tensor, *, where: str) -> None:
    # float32 keeps NaN and inf of the narrow types, some of which have no isnan; float64 would overflow in it.
    values = sink if sink.dtype == torch.float64 else sink.float()
    nans, infinities = int(torch.isnan(values).sum()), int(torch.isposinf(values).sum())
    if nans or infinities:
        found = " and ".join(f"{count} {word}" for count, word in ((nans, "NaN"), (infinities, "+inf")) if count)
        raise SinkValueError(f"the sink {name!r} holds {found} in {values.numel()} values", where=where)
