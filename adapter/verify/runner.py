"""verify: runs the probes on a model and leaves it as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from ..adapt import adapted, is_adapted
from ..attention import NAMES, Attention
from ..errors import AdaptError
from .behaviour import causality, padding_rows, prefill_decode, reference
from .gradients import NAME as GRADIENTS
from .gradients import gradients
from .parallel import NAME as PARALLEL
from .parallel import tensor_parallel
from .saving import NAME as SAVING
from .saving import save_and_load
from .sensitivity import NAME as SENSITIVITY
from .sensitivity import sink_sensitivity
from .subject import Subject
from .verification import FAIL, SKIPPED, Probe, Skip, Verification
from .window import NAME as WINDOW
from .window import window_edge

_PROBES: dict[str, Callable[[Subject], Probe]] = {
    SENSITIVITY: sink_sensitivity,
    "causality": causality,
    WINDOW: window_edge,
    "padding rows": padding_rows,
    GRADIENTS: gradients,
    "prefill + decode = full": prefill_decode,
    PARALLEL: tensor_parallel,
    SAVING: save_and_load,
}


def verify(model: nn.Module, *, input_ids: Tensor | None = None, tolerance: float | None = None) -> Verification:
    """Measure on a loaded model that the adapter computes what the checkpoint says.

    Args:
        model: any transformers model with its weights. One that is not adapted is adapted for the duration. It comes
            back as it was: parameters bit-equal, modes, gradients and random state untouched.
        input_ids: [batch, length] int64, the text to measure on; None draws two random rows that reach over the edge
            of a window of up to 256 tokens.
        tolerance: greatest relative error that passes; None takes 1e-5 for fp32, 4e-3 for fp16, 2e-2 for bf16, and
            for the logits of a half-precision model twice the error of its own eager attention if that is more.

    Returns:
        Eight probes and the comparison with eager. What fails inside a probe is recorded there, not raised.

    Raises:
        AdaptError: some weights are on the meta device, as those are that accelerate offloads.
        SinkholdError: the model cannot be adapted.
    """
    _check_in_memory(model)
    before = is_adapted(model)
    with _undisturbed(model), adapted(model, recording=False):
        subject = Subject(model, input_ids, tolerance)
        compared = _recorded("reference", reference, subject)
        probes = tuple(_recorded(name, probe, subject) for name, probe in _PROBES.items())
    return Verification(f"{type(model).__module__}.{type(model).__qualname__}", before, probes, compared)


def _check_in_memory(model: nn.Module) -> None:
    absent = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if absent:
        raise AdaptError(
            f"{len(absent)} weights are on the meta device: {absent[0]}" + (", ..." if len(absent) > 1 else ""),
            why="verify changes weights and computes with copies of them; all must be in memory",
            fix="load the model without offloading, or a smaller one of the same family",
        )


def _recorded(name: str, probe: Callable[[Subject], Probe], subject: Subject) -> Probe:
    try:
        return probe(subject)
    except Skip as reason:
        return Probe(name, SKIPPED, None, None, str(reason))
    except Exception as error:  # noqa: BLE001 - recorded as this probe's outcome
        return Probe(name, FAIL, None, subject.tolerance, f"{type(error).__name__}: {error}")


@contextmanager
def _undisturbed(model: nn.Module) -> Iterator[None]:
    """Eval mode inside; afterwards modes, random state and what each Attention has recorded are as they were."""
    modes = [(m, m.training) for m in model.modules()]
    attached = [
        (owner, name, attn, {k: _copied(v) for k, v in vars(attn).items()})
        for owner in model.modules()
        for name in NAMES
        if isinstance(attn := owner._modules.get(name), Attention)
    ]
    devices = list({p.device for p in model.parameters() if p.device.type == "cuda"})
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=devices))
        model.eval()
        try:
            yield
        finally:
            for module, mode in modes:
                module.training = mode
            for owner, name, attn, attributes in attached:
                # one that a first call had attached is taken out by restore
                owner._modules[name] = attn
                vars(attn).update(attributes)


def _copied(value: object) -> object:
    return dict(value) if type(value) is dict else value
