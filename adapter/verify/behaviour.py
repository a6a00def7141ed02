"""Probes on the logits: reference, causality, padding rows, prefill + decode = full."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from .subject import Subject, relative
from .verification import Probe, Skip, judge


def reference(subject: Subject) -> Probe:
    """The adapted model's logits against its own eager attention, in units of the logits' scale.

    A half-precision model may be twice as far from its fp32 copy as its own eager attention is.
    """
    if not subject.layers:
        return judge("reference", 0.0, subject.limit, "nothing is adapted: no module calls the attention interface")
    shape = " x ".join(str(n) for n in subject.ids.shape)
    precision = " in fp32" if subject.precise is not None else ""
    wanted = subject.eager if subject.precise is None else subject.precise
    detail = f"logits of {shape} tokens against transformers' eager attention{precision}"
    return judge("reference", subject.error(subject.own, wanted), subject.limit, detail)


def causality(subject: Subject) -> Probe:
    """Later tokens are changed; the logits before them must not be."""
    ids = subject.ids
    cut = ids.shape[1] - max(1, ids.shape[1] // 3)
    changed = ids.clone()
    changed[:, cut:] = subject.draw(ids.shape[0], ids.shape[1] - cut, seed=2)
    number = relative(subject.logits(changed)[:, :cut], subject.own[:, :cut])
    detail = f"{ids.shape[1] - cut} later tokens changed, {cut} earlier logits compared"
    if number > subject.tolerance:
        other = subject.under_eager(lambda: subject.logits(changed))
        theirs = relative(other[:, :cut], subject.eager[:, :cut])
        if theirs > subject.tolerance:
            # Only what eager sees too is the model's own.
            excess = relative(subject.logits(changed), other)
            if excess > subject.tolerance:
                return judge("causality", excess, subject.tolerance, "bidirectional, but not the logits of eager")
            raise Skip(f"bidirectional model: later tokens change earlier logits by {theirs:.1e} under eager too")
    return judge("causality", number, subject.tolerance, detail)


def padding_rows(subject: Subject) -> Probe:
    """Rows of three lengths, padded on the left, against each row alone."""
    width = subject.ids.shape[1]
    lengths = sorted({width, max(1, 2 * width // 3), max(1, width // 4)}, reverse=True)
    rows = [subject.ids[i % subject.ids.shape[0], width - n :] for i, n in enumerate(lengths)]
    pad = getattr(subject.text_config, "pad_token_id", None)
    batch = subject.ids.new_full((len(rows), width), pad if isinstance(pad, int) and pad >= 0 else 0)
    mask = torch.zeros_like(batch)
    for i, row in enumerate(rows):
        batch[i, width - len(row) :], mask[i, width - len(row) :] = row, 1
    real = mask.bool()

    def padded() -> list[Tensor]:
        return [logits[m] for logits, m in zip(subject.logits(batch, mask), real, strict=True)]

    def alone() -> list[Tensor]:
        return [subject.logits(row[None])[0] for row in rows]

    detail = f"left-padded rows of {', '.join(map(str, lengths))} tokens against each alone"
    return _agree(subject, "padding rows", padded, alone, detail, "mixes padded tokens into real ones")


def prefill_decode(subject: Subject) -> Probe:
    """A prefill and single tokens with a cache, against one forward of all."""
    prompt = subject.prompt_length

    def split(logits: Tensor) -> list[Tensor]:
        return [logits[:, :prompt], logits[:, prompt:]]

    def stepwise() -> list[Tensor]:
        return split(subject.stepwise())

    def full() -> list[Tensor]:
        return split(subject.logits(subject.ids))

    detail = f"{prompt} tokens, then {subject.ids.shape[1] - prompt} one by one with the model's own cache"
    habit = "decodes other logits than it prefills"
    return _agree(subject, "prefill + decode = full", stepwise, full, detail, habit)


def _agree(
    subject: Subject,
    name: str,
    one: Callable[[], list[Tensor]],
    two: Callable[[], list[Tensor]],
    detail: str,
    habit: str,
) -> Probe:
    """Both ways give the same; where they do not under eager either, the first way must equal eager's first way."""
    ours = one()
    number = _worst(subject, ours, two())
    if number > subject.limit:
        theirs = subject.under_eager(one)
        habitual = _worst(subject, theirs, subject.under_eager(two))
        if habitual > subject.limit:
            number = _worst(subject, ours, theirs)
            detail = f"against eager on the same input, as the model itself {habit} (by {habitual:.1e} under eager)"
    return judge(name, number, subject.limit, detail)


def _worst(subject: Subject, ours: list[Tensor], theirs: list[Tensor]) -> float:
    """The greatest error of any part; NaN counts as infinite."""
    errors = [subject.error(a, b) for a, b in zip(ours, theirs, strict=True) if a.numel()]
    return max(e if e == e else math.inf for e in errors)
