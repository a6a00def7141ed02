"""Probe: each head's sink moves that head's output as much as the softmax says, and no other head's."""

from __future__ import annotations

import torch
from torch import Tensor

from ..attention import Attention
from .analytic import solve
from .captured import Captured, holding
from .subject import Subject
from .verification import FAIL, Probe, Skip, judge

NAME = "sink sensitivity"


def sink_sensitivity(subject: Subject) -> Probe:
    """Nudge one sink at a time in each layer's real prefill and decode call: d output / d sink = -p_sink * output.

    The derivative is integrated exactly over the nudge. A sink so low or high that a nudge hardly shows is first
    brought to the layer's log-sum-exp. The number is the worst error over the head's greatest output.
    """
    sinking = _sink_layers(subject)
    if not sinking:
        raise Skip("no layer has a sink")
    phases = {"prefill": subject.prefill}
    try:
        phases["decode"] = subject.decode
    except Skip as reason:
        note = f"; prefill only: {reason}"
    else:
        note = ""
    worst, place, heads = 0.0, "", 0
    for phase, calls in phases.items():
        missing = [attn.path for attn in sinking if attn not in calls]
        if missing:
            return Probe(NAME, FAIL, None, subject.tolerance, f"{phase} does not reach {', '.join(missing)}")
        for attn in sinking:
            errors = _errors(calls[attn])
            heads += len(errors) if phase == "prefill" else 0
            for head, error in enumerate(errors):
                if not error <= worst:
                    worst, place = error, f"; worst: {attn.path} head {head} in {phase}"
    detail = f"{len(sinking)} layers, {heads} heads, {' and '.join(phases)}{place}{note}"
    return judge(NAME, worst, subject.tolerance, detail)


def _sink_layers(subject: Subject) -> list[Attention]:
    calls = subject.prefill
    return [a for a in subject.layers if a.sink_kind.value != "none" or (a in calls and calls[a].sink_name is not None)]


def _errors(captured: Captured) -> list[float]:
    """For each head, the worst error of any head's output when that head's sink is nudged."""
    sink = captured.call().sinks
    if sink is None:
        return [float("inf")]
    analytic = solve(captured.call())
    level = analytic.level(sink)
    before = _output(captured, level)
    scales = analytic.output.abs().amax(dim=(0, 1, 3))
    found = []
    for head in range(captured.query.shape[1]):
        nudged = _nudge(level, head)
        moved = _output(captured, nudged) - before
        wanted = analytic.at(nudged) - analytic.at(level)
        error = (moved - wanted).abs().amax(dim=(0, 1, 3)) / scales
        # A head whose values are all zero shows nothing, and nothing is no proof.
        found.append(float(error.max().item()) if float(scales[head]) > 0 else float("nan"))
    return found


def _output(captured: Captured, sink: Tensor) -> Tensor:
    with torch.no_grad(), holding(captured, sink) as call:
        return call.run().double()


def _nudge(sink: Tensor, head: int) -> Tensor:
    nudged = sink.clone()
    target = nudged[head] if sink.dim() == 1 else nudged[:, head]
    # by one, or by what the dtype can tell apart
    target += 1 + 4 * torch.finfo(sink.dtype).eps * target.abs()
    return nudged
