"""Probe: in a windowed layer the key at distance W - 1 counts, and the one at distance W does not."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..attention import Attention
from ..backends import registry
from ..backends.call import AttentionCall
from ..backends.capability import Needs
from ..masks import LazyMask
from .captured import Captured
from .subject import Subject, declared_window, masked_left
from .verification import FAIL, Probe, Skip, judge

NAME = "window edge"
_MARKED = 1
_SEEN = 1e-3


def window_edge(subject: Subject) -> Probe:
    """Mark one value and see which queries notice, in each windowed layer's call with its own mask.

    Queries and sinks are set to zero, so that each visible key weighs the same and none escapes notice. A window longer
    than the input is tried on a longer call of the same layer. The number is the greatest change that a query outside
    the window sees, over the least change that one inside sees.
    """
    windowed = [(captured, left) for captured in subject.prefill.values() if (left := reach(captured)) is not None]
    if not windowed:
        raise Skip("no layer has a window")
    worst, place, stretched, unseen = 0.0, "", 0, []
    for captured, left in windowed:
        attn, length = captured.attn, captured.query.shape[2]
        contradiction = _contradiction(captured, left)
        if contradiction:
            return Probe(NAME, FAIL, None, subject.tolerance, f"{attn.path}: {contradiction}")
        call = _even(captured.call())
        if length < left + _MARKED + 2:
            call, stretched = _stretched(call, left + _MARKED + 3), stretched + 1
        for phase, (inside, outside) in _changes(attn, call, left).items():
            if not inside > _SEEN:
                unseen.append(f"{attn.path} in {phase}")
            elif not outside / inside <= worst:
                worst, place = outside / inside, f"; worst: {attn.path} in {phase}"
    if unseen:
        detail = f"a key inside the window does not count: {', '.join(unseen)}"
        return Probe(NAME, FAIL, None, subject.tolerance, detail)
    note = f"; {stretched} on a call longer than the input" if stretched else ""
    return judge(NAME, worst, subject.tolerance, f"{len(windowed)} layers, prefill and decode{note}{place}")


def reach(captured: Captured) -> int | None:
    """The greatest distance backwards: by what the layer declares, else by its mask; None without a window."""
    window = declared_window(captured.attn)
    # Layers that look both ways do not agree on whether their window counts the query; their mask says it.
    if window is None or _both_ways(captured):
        return masked_left(captured.mask)
    return window - 1


def _both_ways(captured: Captured) -> bool:
    return isinstance(captured.mask, LazyMask) and captured.mask.visibility.right != 0


def _contradiction(captured: Captured, left: int) -> str | None:
    mask, window = captured.mask, declared_window(captured.attn)
    if not isinstance(mask, LazyMask) or mask.visibility.dense is not None:
        return None
    if mask.visibility.left != left or (window is not None and left not in (window - 1, window)):
        return f"the layer declares a window of {window}, its mask reaches {mask.visibility.left} back"
    return None


def _even(call: AttentionCall) -> AttentionCall:
    sinks = None if call.sinks is None else torch.zeros_like(call.sinks)
    return replace(call, query=torch.zeros_like(call.query), sinks=sinks)


def _stretched(call: AttentionCall, length: int) -> AttentionCall:
    """The last three queries of a call of `length` tokens whose keys and values are those of `call` over again."""
    v = call.visibility
    if call.bias is not None or v.dense is not None or v.documents is not None or v.padding is not None:
        raise Skip("a window is longer than the input, and its mask cannot be lengthened: pass longer input_ids")
    order = torch.arange(length, device=call.key.device) % call.key.shape[2]
    sinks = call.sinks
    return replace(
        call,
        query=call.query[:, :, :1].expand(-1, -1, 3, -1).contiguous(),
        key=call.key[:, :, order],
        value=call.value[:, :, order],
        visibility=v.with_(q_length=3, kv_length=length, q_offset=length - 3, kv_offset=0),
        sinks=sinks if sinks is None or sinks.dim() == 1 else sinks[:, :, :1].expand(-1, -1, 3, -1).contiguous(),
    )


def _changes(attn: Attention, call: AttentionCall, left: int) -> dict[str, tuple[float, float]]:
    """For each phase, the least change that a query inside the window sees, and the greatest that one outside sees."""
    kv_length, count = call.key.shape[2], call.query.shape[2]
    value = call.value.clone()
    value[:, :, _MARKED] += kv_length
    first = call.visibility.q_offset if isinstance(call.visibility.q_offset, int) else 0
    edge = _MARKED + left - first  # the last query that sees the marked key
    found = {}
    for phase, spans in {"prefill": [(0, count)], "decode": [(edge, edge + 1), (edge + 1, edge + 2)]}.items():
        changes = torch.cat([_change(attn, call, value, span) for span in spans], dim=1)
        start = spans[0][0]
        inside = changes[:, max(0, _MARKED - first - start) : edge - start + 1]
        found[phase] = (float(inside.min().item()), float(changes[:, edge - start + 1 :].max().item()))
    return found


def _change(attn: Attention, call: AttentionCall, value: Tensor, span: tuple[int, int]) -> Tensor:
    """[batch, queries of the span, num_heads]: how far the output moves when the values become `value`."""
    outputs = []
    for given in (call, replace(call, value=value)):
        part = given.narrow(*span, 0, call.key.shape[2])
        with torch.no_grad():
            outputs.append(registry.select(attn.backend, Needs.of(part)).attend(part).output.double())
    return (outputs[1] - outputs[0]).abs().amax(dim=3)
