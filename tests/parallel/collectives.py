"""Counts what the ranks say to each other, layer by layer."""

from __future__ import annotations

import gc
from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import adapter
from adapter.parallel.sharing import SharedInput
from tests.families import FAMILIES, tokens

_KINDS = {
    "c10d.allreduce_": "all-reduce", "_c10d_functional.all_reduce": "all-reduce",
    "c10d.alltoall_base_": "all-to-all", "_c10d_functional.all_to_all_single": "all-to-all",
    "_c10d_functional.all_gather_into_tensor": "all-gather",
}  # fmt: skip
_NO_TRAFFIC = ("wait_tensor", "_wrap_tensor_autograd")
OUTSIDE = "outside"


class Collectives(TorchDispatchMode):
    """While it is active, counts the collectives of this rank, plain and functional ones, by the place they ran in.

    A decoder layer is a place; `OUTSIDE` is everything else. In a backward a place lasts until the next layer's.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.place = OUTSIDE
        self.counts: dict[str, Counter[str]] = {}
        self.handles = []
        attentions = (path for path, module in model.named_modules() if isinstance(module, adapter.Attention))
        for path in (attn.rsplit(".", 2)[0] for attn in attentions):
            layer = model.get_submodule(path)
            self.handles += [
                layer.register_forward_pre_hook(lambda *_, place=path: self.move(place)),
                layer.register_forward_hook(lambda *_: self.move(OUTSIDE)),
                layer.register_full_backward_pre_hook(lambda *_, place=path: self.move(place)),
            ]

    def move(self, place: str) -> None:
        self.place = place

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for handle in self.handles:
            handle.remove()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().replace("::", ".")
        if "c10d" in func.namespace and name.split(".")[1] not in _NO_TRAFFIC:
            self.counts.setdefault(self.place, Counter())[_KINDS.get(name, name)] += 1
        return func(*args, **(kwargs or {}))


def kept_inputs() -> list[SharedInput]:
    """The shared inputs that outlive their forward, and the graph with them."""
    return [found for found in gc.get_objects() if type(found) is SharedInput and found._given is not None]


def counted(folders: dict[str, Any]) -> dict[str, dict[str, dict[str, dict[str, int]]]]:
    """On a rank: family -> phase -> layer -> kind of collective -> how many."""
    found = {}
    for name, folder in folders.items():
        model = getattr(adapter, FAMILIES[name].auto).from_pretrained(folder, tp_plan="auto")
        ids = tokens(2, 12)
        with torch.no_grad():
            model(input_ids=ids)
            with Collectives(model) as inference:
                model(input_ids=ids)
        with Collectives(model) as forward:
            logits = model(input_ids=ids).logits
        with Collectives(model) as backward:
            logits = model(input_ids=ids).logits
            backward.counts.clear()
            assert not kept_inputs()
            logits.square().mean().backward()
        phases = {"inference": inference, "forward": forward, "backward": backward}
        found[name] = {phase: {p: dict(c) for p, c in by.counts.items()} for phase, by in phases.items()}
    return found
