"""One class for each kind of fault, each with a code, what happened, where, why it matters and the remedy."""

from __future__ import annotations

from fusers.errors import RefusedError, ResolveError, SinkholdError, SourceError

__all__ = [
    "AdaptError",
    "BackendError",
    "CallError",
    "CheckpointError",
    "EnvironmentFault",
    "ParallelError",
    "ProofError",
    "RefusedError",
    "ResolveError",
    "SinkError",
    "SinkholdError",
    "SourceError",
]


class SinkError(SinkholdError):
    """A sink would be dropped, or is not the one that the attention applies."""

    code = "SINK-201"
    default_why = "every softmax of this layer would be wrong: no error, plausible text, wrong model"
    default_fix = "adapt the model again with adapter.adapt(model), or restore it with adapter.restore(model)"


class CallError(SinkholdError):
    """The model hands something to its attention that the adapter does not consume."""

    code = "SINK-202"
    default_why = "what is handed to the attention and not used changes the output in silence"
    default_fix = "run this model without the adapter, and report the class and the keyword"


class BackendError(SinkholdError):
    """No backend, or not the one asked for, can run a layer."""

    code = "SINK-301"
    default_why = "running it on something else would be a fallback that nobody asked for"
    default_fix = 'use backend="auto", or one of those that refuse nothing'


class ProofError(SinkholdError):
    """A backend accepted a case and computed something else than the reference."""

    code = "SINK-302"
    default_why = "a backend that accepts a sink and ignores it gives wrong text without an error"
    default_fix = 'choose another backend, for example backend="eager", and report this one'


class CheckpointError(SinkholdError):
    """A checkpoint that must not be loaded as it is."""

    code = "SINK-401"
    default_why = "the model would run with weights that are not the ones its author saved"
    default_fix = "download or export the checkpoint again"


class AdaptError(SinkholdError):
    """A model cannot be adapted or restored."""

    code = "SINK-501"
    default_fix = "run the model without the adapter"


class ParallelError(SinkholdError):
    """A tensor-parallel plan and the model do not fit."""

    code = "SINK-601"
    default_why = "a sink on the wrong rank belongs to another head"


class EnvironmentFault(SinkholdError):
    """Something about the installation stands in the way."""

    code = "SINK-701"
