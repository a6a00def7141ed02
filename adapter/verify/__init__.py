"""Eight probes that a loaded model computes what its checkpoint says, on its own layers, masks and caches."""

from __future__ import annotations

from .runner import verify
from .verification import Probe, Verification

__all__ = ["Probe", "Verification", "verify"]
