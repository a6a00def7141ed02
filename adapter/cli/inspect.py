"""sinkhold inspect: what adapting a checkpoint would find, from its configuration alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..adapt import adapt
from ..backends import registry
from ..checkpoint import CheckpointSummary, check_checkpoint
from .console import out, print_json, working
from .load import BackendOption, JsonOption, PathArgument, TrustOption, build_on_meta, check_backend


def inspect(
    path: PathArgument,
    json: JsonOption = False,
    backend: BackendOption = registry.AUTO,
    trust_remote_code: TrustOption = False,
) -> None:
    """Show what a checkpoint's attention passes, and which backend will run it.

    Builds the model without weights: for each layer the class, the file and line of the call, the scale, the sink, the
    window, the backend, and why not the others. Of the weights only the headers, and the sinks, are read.
    """
    check_backend(backend)
    with working("building the model without weights"):
        model = build_on_meta(path, trust_remote_code)
        report = adapt(model, backend, recording=False)
        stored = _stored(path)
    if json:
        print_json({**report.to_dict(), "checkpoint": _as_dict(stored)})
        return
    console = out()
    console.print(str(report))
    console.print(_sentence(stored))


def _stored(path: str) -> CheckpointSummary | None:
    folder = Path(path)
    if not folder.is_dir() or not any(folder.glob("*.safetensors")):
        return None
    return check_checkpoint(folder, use_safetensors=True)


def _as_dict(stored: CheckpointSummary | None) -> dict[str, Any] | None:
    if stored is None:
        return None
    sinks = {key: {"dtype": stored.tensors[key].dtype, "shape": stored.tensors[key].shape} for key in stored.sinks}
    return {"files": [f.name for f in stored.files], "bytes": stored.nbytes, "sinks": sinks, "notes": stored.notes}


def _sentence(stored: CheckpointSummary | None) -> str:
    if stored is None:
        return "  weights: no safetensors here; their sinks were not looked at"
    dtypes = ", ".join(sorted({stored.tensors[key].dtype for key in stored.sinks})) or "none"
    size = f"{stored.nbytes / 1e6:,.1f} MB in {len(stored.files)} file{'s'[: len(stored.files) > 1]}"
    return f"  weights: {size}, checked; sink tensors: {len(stored.sinks)} ({dtypes})"
