"""The outcome of a class: whether its calls have a meaning that the source alone gives."""

from __future__ import annotations

import ast

from .base import Argument, InterfaceCall, Outcome
from .flow import Flow
from .interface import POSITIONAL, Calls
from .members import Unknown
from .resolve import Resolver
from .sinks import SINK_KEYWORDS, is_computed, is_other_sink
from .values import Symbol

PER_CALL = frozenset((
    "position_bias", "indices", "block_indices", "position_ids", "attention_mask", "cu_seq_lens_q", "cu_seq_lens_k",
    "max_length_q", "max_length_k", "max_seqlen", "cu_seqlens", "head_mask", "cache", "past_key_values",
    "cache_position", "seq_idx",
))  # fmt: skip
"""Keywords whose value belongs to one call; the adapter takes them from the call, so no static form is needed."""

PER_MODE = frozenset(("dropout", "output_attentions", "deterministic", "training", "use_cache"))
"""Keywords that follow train() and eval() or what the caller asked for."""

SETTINGS = ("scaling", "sliding_window", "softcap", "is_causal")
"""Keywords that are settings of the layer and change the mathematics."""

ORDER_DIFFERS = "after the mask, the order of the positional arguments differs between attention functions"


def classify(found: Calls, resolver: Resolver, flow: Flow) -> tuple[Outcome, str]:
    """The outcome and its reason, from a resolver that knows only the class."""
    if not found.calls and not found.doubts:
        return Outcome.NONE, "the forward does not call the attention interface"
    refusals = [reason for call in found.calls for reason in _refusals(call)]
    if refusals:
        return Outcome.REFUSED, refusals[0]
    doubts = [*found.doubts]
    for call in found.calls:
        doubts.extend(_doubts(call, resolver, flow))
    doubts.extend(_disagreements(found.calls))
    if doubts:
        return Outcome.DYNAMIC, "; ".join(dict.fromkeys(doubts))
    return Outcome.RESOLVED, "every argument that changes the mathematics has a static meaning"


def _refusals(call: InterfaceCall) -> list[str]:
    given = [a for a in call.arguments if not _is_none(a.node)]
    others = [a.name for a in given if is_other_sink(a.name)]
    reasons = [f"the keyword {name!r} names a kind of sink that is not implemented" for name in others]
    if all(any(a.name == name for a in given) for name in SINK_KEYWORDS):
        reasons.append("the call passes two sinks, s_aux and sinks")
    names = [a.name for a in call.arguments]
    reasons.extend(f"the call passes {name!r} twice" for name in dict.fromkeys(names) if names.count(name) > 1)
    if any(name.startswith("positional_") for name in names):
        reasons.append(f"the call passes more than {len(POSITIONAL)} positional arguments")
    return reasons


def _doubts(call: InterfaceCall, resolver: Resolver, flow: Flow) -> list[str]:
    doubts = []
    if call.argument("scaling") is None:
        doubts.append("no scale is passed, and the default differs between attention functions")
    for argument in call.arguments:
        doubt = _doubt(argument, resolver, flow)
        if doubt:
            doubts.append(f"{argument.name}={argument.expression}: {doubt}")
    return doubts


def _doubt(argument: Argument, resolver: Resolver, flow: Flow) -> str | None:
    name = argument.name
    if argument.positional:
        return ORDER_DIFFERS if name in POSITIONAL[5:] else None
    if name in PER_CALL or name in PER_MODE or name in POSITIONAL[:5]:
        return None
    try:
        found = resolver.find(argument.node)
    except Unknown as unknown:
        return None if name in SINK_KEYWORDS and is_computed(argument.node, flow) else str(unknown)
    if name in SINK_KEYWORDS:
        changed = isinstance(found, Symbol) and not found.exact
        return "the sink is computed from what it names" if changed else None
    return None if name in SETTINGS or found is None else "the keyword is not one that attention functions share"


def _disagreements(calls: tuple[InterfaceCall, ...]) -> list[str]:
    reasons = []
    for name in (*SETTINGS, *SINK_KEYWORDS):
        given = {None if (a := call.argument(name)) is None else a.expression for call in calls}
        if len(given) > 1:
            reasons.append(f"the calls differ in {name}")
    return reasons


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None
