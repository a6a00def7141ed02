"""sinkhold env: what a bug report needs."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from typing import Any

import torch

import adapter

from ..backends import plugins, registry
from ..errors import BackendError
from .console import out, print_json
from .load import JsonOption

_PACKAGES = (
    "torch", "transformers", "triton", "accelerate", "safetensors", "huggingface-hub", "tokenizers", "peft", "kernels",
    "flash-attn", "flash-attn-4", "flashinfer-python", "triattention", "typer", "rich",
)  # fmt: skip


def env(json: JsonOption = False) -> None:
    """Print versions, devices and backends, ready to paste into a report."""
    facts = gather()
    if json:
        print_json(facts)
        return
    console = out()
    for title, lines in facts.items():
        console.print(f"{title}:")
        width = max((len(name) for name in lines), default=0)
        for name, text in lines.items():
            console.print(f"  {name:<{width}}  {text}")


def gather() -> dict[str, dict[str, str]]:
    """All facts by section; imports no optional package except through the backends themselves."""
    return {"versions": _versions(), "machine": _machine(), "backends": _backends()}


def _versions() -> dict[str, str]:
    found = {"sinkhold": adapter.__version__, "python": sys.version.split()[0]}
    found |= {name: _version(name) for name in _PACKAGES}
    return found | {"torch": torch.__version__}  # with the build, which the package's own version may leave out


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _machine() -> dict[str, str]:
    found = {"platform": platform.platform(), "cpus": f"{os.cpu_count()}, torch uses {torch.get_num_threads()} threads"}
    found["torch built for"] = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU"
    for index in range(torch.cuda.device_count()):
        found[f"cuda:{index}"] = _describe(torch.cuda.get_device_properties(index))
    if not torch.cuda.device_count():
        found["cuda"] = "no device"
    return found


def _describe(properties: Any) -> str:
    memory = properties.total_memory / 2**30
    return f"{properties.name}, compute capability {properties.major}.{properties.minor}, {memory:.0f} GiB"


def _backends() -> dict[str, str]:
    foreign = {
        p.name: f"of {p.distribution} {p.version} ({p.target}), loaded when asked for" for p in plugins.listing()
    }
    return {name: foreign.get(name) or _availability(name) for name in registry.names()}


def _availability(name: str) -> str:
    try:
        backend = registry.get(name)
    except BackendError as error:
        return f"not available: {error.what}"
    reason = backend.unavailable()
    devices = ", ".join(sorted(backend.capability.devices))
    return f"not available: {reason}" if reason else f"available on {devices}"
