"""Probes on the logits: reference, causality, padding rows, prefill + decode = full."""

from __future__ import annotations

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

    def padded() -> Tensor:
        return subject.logits(batch, mask)[real]

    def alone() -> Tensor:
        return torch.cat([subject.logits(row[None])[0] for row in rows])

    detail = f"left-padded rows of {', '.join(map(str, lengths))} tokens against each alone"
    return _agree(subject, "padding rows", padded, alone, detail, "mixes padded tokens into real ones")


def prefill_decode(subject: Subject) -> Probe:
    """A prefill and single tokens with a cache, against one forward of all."""
    detail = f"{subject.ids.shape[1]} tokens, the last ones fed one by one with the model's own cache"
    habit = "decodes other logits than it prefills"

    def full() -> Tensor:
        return subject.logits(subject.ids)

    return _agree(subject, "prefill + decode = full", subject.stepwise, full, detail, habit)


def _agree(
    subject: Subject, name: str, one: Callable[[], Tensor], two: Callable[[], Tensor], detail: str, habit: str
) -> Probe:
    """Both ways give the same; where they do not under eager either, the first way must equal eager's first way."""
    ours = one()
    number = subject.error(ours, two())
    if number > subject.limit:
        theirs = subject.under_eager(one)
        habitual = subject.error(theirs, subject.under_eager(two))
        if habitual > subject.limit:
            number = subject.error(ours, theirs)
            detail = f"against eager on the same input, as the model itself {habit} (by {habitual:.1e} under eager)"
    return judge(name, number, subject.limit, detail)
