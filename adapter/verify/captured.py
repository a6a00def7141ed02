"""One real interface call of a layer, taken down so that it can be run again with one thing changed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from fusers.base import SinkKind

from ..attention import Attention
from ..backends.call import AttentionCall
from ..translate import build_call


@dataclass(frozen=True, eq=False)
class Captured:
    """The arguments of one call; shapes as in `Attention.forward`. `kwargs` holds every keyword, the sink included."""

    attn: Attention
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Any
    kwargs: dict[str, Any]

    @property
    def sink_name(self) -> str | None:
        """The keyword that carries the sink."""
        return next((n for n in ("s_aux", "sinks") if self.kwargs.get(n) is not None), None)

    @property
    def per_token(self) -> bool:
        """Whether the sink is computed for each token."""
        return self.attn.sink_kind is SinkKind.PER_TOKEN

    def sink(self) -> Tensor | None:
        """The sink of this call as the registered parameter holds it now."""
        if self.sink_name is None:
            return None
        passed: Tensor = self.kwargs[self.sink_name]
        registered = self.attn.sinks
        if registered is None or passed is registered:
            return passed
        return registered.reshape(passed.shape).to(passed.dtype)

    def with_(self, **changes: Any) -> Captured:
        """A copy with some tensors changed."""
        return replace(self, **changes)

    def with_sink(self, sink: Tensor) -> Captured:
        """A copy with another sink for each token."""
        assert self.sink_name is not None
        return replace(self, kwargs={**self.kwargs, self.sink_name: sink})

    def call(self) -> AttentionCall:
        """The same in the backends' terms."""
        tensors = (self.query, self.key, self.value)
        return build_call(self.attn.owner, self.attn, tensors, self.mask, self.sink(), self.kwargs)

    def run(self) -> Tensor:
        """Through the layer's Attention, guard and backend: [batch, q_length, num_heads, v_head_dim]."""
        kwargs = self.kwargs if self.sink_name is None else {**self.kwargs, self.sink_name: self.sink()}
        output: Tensor = self.attn(self.query, self.key, self.value, self.mask, **kwargs)[0]
        return output


@contextmanager
def holding(captured: Captured, sink: Tensor | None) -> Iterator[Captured]:
    """The call with its sink at `sink`, shaped as in `captured.call()`; None leaves it as it is.

    A parameter gets its old bits back, whatever happens.
    """
    if sink is None or captured.per_token:
        yield captured if sink is None else captured.with_sink(sink)
        return
    registered = captured.attn.sinks
    assert registered is not None
    before = registered.detach().clone()
    try:
        # .data: autograd must not count this as a change of the parameter
        registered.data.copy_(sink.reshape(registered.shape))
        yield captured
    finally:
        registered.data.copy_(before)


@contextmanager
def capturing(model: nn.Module) -> Iterator[dict[Attention, Captured]]:
    """Take down the last call that each Attention below `model` gets while the block runs."""
    found: dict[Attention, Captured] = {}

    def keep(attn: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        assert isinstance(attn, Attention)
        query, key, value, *rest = args
        keywords = dict(kwargs)
        mask = rest[0] if rest else keywords.pop("attention_mask", None)
        query, key, value = (t.detach().clone() for t in (query, key, value))
        found[attn] = Captured(attn, query, key, value, mask, keywords)

    layers = [m for m in model.modules() if isinstance(m, Attention)]
    hooks = [layer.register_forward_pre_hook(keep, with_kwargs=True) for layer in layers]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()
