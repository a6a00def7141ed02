"""Hugging Face models with attention sinks, run correctly and fast.

Importing it makes `attn_implementation="sinkhold"` known to transformers.
"""

from __future__ import annotations

from . import _identity as _identity  # first: it refuses a foreign package in the way  # isort: skip
from .adapt import adapt, adapted, is_adapted, report, restore
from .attention import Attention
from .auto import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    from_pretrained,
)
from .errors import (
    AdaptError,
    BackendError,
    CallError,
    CheckpointError,
    ParallelError,
    ProofError,
    SinkError,
    SinkholdError,
)
from .guard import check_call, check_sinks
from .interface import IMPLEMENTATION
from .interface import register as _register
from .report import LayerReport, Report
from .verify import Probe, Verification, verify

__version__ = "0.1.0"

__all__ = [
    "IMPLEMENTATION",
    "AdaptError",
    "Attention",
    "AutoModel",
    "AutoModelForCausalLM",
    "AutoModelForImageTextToText",
    "AutoModelForSeq2SeqLM",
    "AutoModelForSequenceClassification",
    "AutoModelForTokenClassification",
    "BackendError",
    "CallError",
    "CheckpointError",
    "LayerReport",
    "ParallelError",
    "Probe",
    "ProofError",
    "Report",
    "SinkError",
    "SinkholdError",
    "Verification",
    "adapt",
    "adapted",
    "check_call",
    "check_sinks",
    "from_pretrained",
    "is_adapted",
    "report",
    "restore",
    "verify",
]

_register()
