"""Probe: dq, dk, dv and the sink's gradient are those of the specification."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..backends import registry
from ..backends.capability import Needs
from ..backends.reference import BACKEND as REFERENCE
from ..errors import BackendError
from .analytic import solve
from .captured import Captured, holding
from .subject import Subject
from .verification import Probe, Skip, judge

NAME = "gradients"


def gradients(subject: Subject) -> Probe:
    """Each layer's real prefill call backwards, against the reference in fp64.

    The number is the worst error of a gradient over its greatest value, for query, key, value and sink. A layer whose
    backend refuses a backward is left out by name; where all do, the model is for inference only, and that is no fault.
    """
    if not subject.prefill:
        raise Skip("no layer calls the attention interface")
    worst, place, refused, backends = 0.0, "", [], set()
    for attn, captured in subject.prefill.items():
        try:
            backend, errors = _errors(captured)
        except BackendError as refusal:
            refused.append(f"{attn.path}: {refusal.what}")
            continue
        backends.add(backend)
        for name, error in errors.items():
            if not error <= worst:
                worst, place = error, f"; worst: d{name} of {attn.path}"
    if not backends:
        raise Skip(f"inference only: {refused[0]}")
    note = f"; no backward for {len(refused)} ({refused[0]})" if refused else ""
    detail = f"{len(subject.prefill) - len(refused)} layers, backward by {', '.join(sorted(backends))}{note}{place}"
    return judge(NAME, worst, subject.tolerance, detail)


def _errors(captured: Captured) -> tuple[str, dict[str, float]]:
    """The backend that ran, and the relative error of each gradient."""
    sink = captured.call().sinks
    level = None if sink is None else solve(captured.call()).level(sink)
    with torch.enable_grad(), holding(captured, level) as held:
        names, ours, upstream, backend = _ours(held)
        theirs = _theirs(held, upstream)
        floors = _floors(held, upstream)
    rows = zip(names, ours, theirs, floors, strict=False)
    return backend, {name: _relative(a, b, floor) for name, a, b, floor in rows}


def _leaves(captured: Captured, dtype: torch.dtype | None = None) -> list[Tensor]:
    tensors = (captured.query, captured.key, captured.value)
    return [t.detach().clone().to(dtype or t.dtype).requires_grad_() for t in tensors]


def _ours(captured: Captured) -> tuple[list[str], list[Tensor], Tensor, str]:
    query, key, value = _leaves(captured)
    held = captured.with_(query=query, key=key, value=value)
    names, inputs, parameter = ["query", "key", "value"], [query, key, value], None
    if held.per_token:
        assert held.sink_name is not None
        leaf = held.kwargs[held.sink_name].detach().clone().requires_grad_()
        held = held.with_sink(leaf)
        names, inputs = [*names, "sink"], [*inputs, leaf]
    elif held.sink_name is not None and held.attn._get_sink is not None:
        # Of a sharded sink the whole parameter: its shard is made anew each time.
        parameter = held.attn._get_sink(held.attn.owner)
    asked = parameter is not None and parameter.is_leaf and not parameter.requires_grad
    try:
        if parameter is not None:
            parameter.requires_grad_(parameter.requires_grad or asked)
            names, inputs = [*names, "sink"], [*inputs, parameter]
        backend = registry.select(held.attn.backend, Needs.of(held.call())).name
        output = held.run()
        upstream = _upstream(output)
        grads = torch.autograd.grad(output, inputs, upstream, allow_unused=True)
    finally:
        if asked and parameter is not None:
            parameter.requires_grad_(False)
    ours = [torch.zeros_like(t) if g is None else g for g, t in zip(grads, inputs, strict=True)]
    return names, [g.to_local() if hasattr(g, "to_local") else g for g in ours], upstream, backend


def _theirs(captured: Captured, upstream: Tensor) -> list[Tensor]:
    call = captured.call()
    inputs = _leaves(captured, torch.float64)
    # a scaling tensor is multiplied into the query by build_call
    scaling = captured.kwargs.get("scaling")
    query = inputs[0] * scaling.double() if isinstance(scaling, Tensor) else inputs[0]
    sinks = None if call.sinks is None else call.sinks.detach().double().requires_grad_()
    call = replace(call, query=query, key=inputs[1], value=inputs[2], sinks=sinks)
    output = REFERENCE.attend(call).output
    return list(torch.autograd.grad(output, inputs if sinks is None else [*inputs, sinks], upstream.double()))


def _upstream(output: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(output.shape, generator=generator).to(output)


def _floors(captured: Captured, upstream: Tensor) -> list[float]:
    """The usual size of dq, dk, dv and dsink, for the error of a gradient that is zero by nature."""
    call = captured.call()
    tensors = (call.query, call.key, call.value, upstream)
    query, key, value, output = (float(t.double().square().mean().sqrt()) for t in tensors)
    logit = output * value * call.value.shape[3] ** 0.5
    return [abs(call.scale) * logit * key, abs(call.scale) * logit * query, output, logit]


def _relative(ours: Tensor, theirs: Tensor, floor: float) -> float:
    ours, theirs = ours.detach().double().flatten(), theirs.flatten()
    return float((ours - theirs).abs().max().item()) / max(float(theirs.abs().max().item()), floor, 1e-30)
