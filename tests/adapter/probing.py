"""What the tests of verify share: a small model, the names of the probes, one row of the outcome."""

from __future__ import annotations

from adapter.verify import Probe, Verification
from tests.families import build

SENSITIVITY, CAUSALITY, WINDOW, PADDING = "sink sensitivity", "causality", "window edge", "padding rows"
GRADIENTS, DECODE, SAVING = "gradients", "prefill + decode = full", "save and load"
PARALLEL = "tensor parallel = single"
PROBES = (SENSITIVITY, CAUSALITY, WINDOW, PADDING, GRADIENTS, DECODE, PARALLEL, SAVING)


def small(**overrides):
    """Two layers, one with a window of 8 and one without, each with four sinks."""
    return build("gpt_oss", num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"], **overrides)


def row(found: Verification, name: str) -> Probe:
    """The row of that name."""
    return next(p for p in found.rows if p.name == name)
