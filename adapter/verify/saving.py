"""Probe: what save_pretrained writes loads without the adapter, with the same keys, bytes and logits."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import logging

from .parallel import world_size
from .subject import LARGEST, Subject, relative
from .verification import FAIL, Probe, Skip, judge

NAME = "save and load"


def save_and_load(subject: Subject) -> Probe:
    """Save the adapted model, load it with its own class and eager attention, compare.

    Of a model that is too large to be written only keys and shapes are compared, with those of its class on meta.
    """
    model: Any = subject.model
    if not hasattr(model, "save_pretrained") or not hasattr(type(model), "from_pretrained"):
        raise Skip("the model has no save_pretrained")
    if world_size() > 1:
        raise Skip("each rank holds a part of the model: verify it on a single process")
    before = dict(model.state_dict())
    if subject.size > LARGEST:
        return _compare_keys(subject, before)
    loaded = _reload(model)
    difference = _difference(before, loaded.state_dict())
    if difference:
        return Probe(NAME, FAIL, None, subject.tolerance, difference)
    loaded = loaded.to(subject.device).eval()
    unlike = _align(loaded, model)
    # Against eager: whether the adapted model equals eager is the reference's to say.
    number = relative(Subject(loaded, subject.ids, subject.tolerance).own, subject.eager)
    note = f"; taken over for them: what no checkpoint keeps, as in {unlike[0]}" if unlike else ""
    detail = f"{len(before)} tensors byte-equal after plain transformers loaded them; logits against eager{note}"
    return judge(NAME, number, subject.tolerance, detail)


def _align(loaded: nn.Module, model: nn.Module) -> list[str]:
    """Give `loaded` the dtypes and the unsaved buffers of `model`, which a cast of the model changes; their names."""
    unlike = []
    for (name, ours), theirs in zip(model.named_parameters(), loaded.parameters(), strict=True):
        if ours.dtype != theirs.dtype:
            theirs.data = theirs.data.to(ours.dtype)
            unlike.append(name)
    buffers = dict(loaded.named_buffers())
    for name, buffer in model.named_buffers():
        if name in buffers and not (buffer.dtype == buffers[name].dtype and torch.equal(buffer, buffers[name])):
            buffers[name].data = buffer.detach().clone()
            unlike.append(name)
    return unlike


def _reload(model: Any) -> Any:
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with tempfile.TemporaryDirectory() as folder, _kept(model):
            model.save_pretrained(folder)
            return type(model).from_pretrained(folder, attn_implementation="eager", dtype=model.dtype)
    finally:
        if shown:
            logging.enable_progress_bar()


@contextmanager
def _kept(model: Any) -> Iterator[None]:
    """save_pretrained writes into the configs; they get their attributes back."""
    configs = [c for c in (model.config, getattr(model, "generation_config", None)) if c is not None]
    before = [dict(vars(c)) for c in configs]
    try:
        yield
    finally:
        for config, attributes in zip(configs, before, strict=True):
            config.__dict__.clear()
            config.__dict__.update(attributes)


def _compare_keys(subject: Subject, before: dict[str, Tensor]) -> Probe:
    config = copy.deepcopy(subject.model.config)
    with torch.device("meta"):
        plain: nn.Module = type(subject.model)(config)
    difference = _difference(before, plain.state_dict(), values=False)
    if difference:
        return Probe(NAME, FAIL, None, None, difference)
    size = f"{subject.size / 1024**3:.1f} GiB"
    detail = f"{size} are not written: {len(before)} keys and shapes equal those of the plain class on meta"
    return judge(NAME, 0.0, subject.tolerance, detail)


def _difference(before: dict[str, Tensor], after: dict[str, Tensor], *, values: bool = True) -> str | None:
    """The first difference in words, or None."""
    for name in sorted(before.keys() ^ after.keys()):
        return f"{name} is {'lost' if name in before else 'new'} in what plain transformers loads"
    for name, tensor in before.items():
        other = after[name]
        if tensor.shape != other.shape:
            return f"{name} is {list(other.shape)} after loading, was {list(tensor.shape)}"
        # transformers may keep a tensor in a wider dtype than the one that it was saved in
        if values and not _same_bytes(tensor, other.to(tensor.dtype)):
            return f"{name} has other bytes after saving and loading"
    return None


def _same_bytes(a: Tensor, b: Tensor) -> bool:
    # as bytes, since NaN differs from itself
    a, b = (t.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
    return torch.equal(a, b)
