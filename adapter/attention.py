"""The registered submodule that runs a layer's attention, and the function that transformers calls."""

from __future__ import annotations

import itertools
import operator
import threading
import weakref
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fusers.attention import AttentionFuser
from fusers.base import LayerFinding, SinkKind, Status

from .backends import registry
from .backends.call import Attended, AttentionCall
from .backends.capability import Needs, key_of
from .errors import CallError, SinkError
from .guard import check_call, check_heads, check_sinks, registered_values, where
from .translate import build_call

NAMES = ("attn", "sinkhold_attn")
"""Where the submodule is put: the first name that the module does not use itself."""

FUSER = AttentionFuser()
"""One for all: it keeps what it read of each class."""

_ATTACHING = threading.Lock()
_NUMBERS = itertools.count()
_LIVE: weakref.WeakValueDictionary[int, Attention] = weakref.WeakValueDictionary()
"""By number, which a traced graph can hold as a constant."""


class Context(Protocol):
    """What runs the calls of a model whose sequence is spread over ranks."""

    def attend(
        self,
        attn: Attention,
        qkv: tuple[Tensor, Tensor, Tensor],
        mask: Any,
        sink: Tensor | None,
        kwargs: dict[str, Any],
    ) -> Tensor:
        """The output [batch, q_length, num_heads, v_head_dim] of a call that passed the guard."""


class Attention(nn.Module):
    """One layer's attention: what the source said about it, its live sink, and the backend that runs it.

    It holds no tensor of its own, so the model's state dict does not change.

    Args:
        owner: the model's attention module; kept by weak reference.
        finding: what AttentionFuser found on it.
        backend: a backend's name, or 'auto'.
        path: the owner's dotted path in the model, for reports and errors.
    """

    def __init__(self, owner: nn.Module, finding: LayerFinding, backend: str = "auto", path: str = "") -> None:
        super().__init__()
        self._owner = weakref.ref(owner)
        self.finding = finding
        self.backend = backend
        self.path = path
        self.chosen: dict[Needs, str] = {}
        """Which backend ran each kind of call so far."""
        self.mask_is_kept = False
        """Nothing between the mask's builder and this layer writes into the mask, so that its meaning stays true."""
        self.recorded: dict[str, Any] | None = None
        """What the first call passed; compared with the finding."""
        self.context: Context | None = None
        """Set while the sequence is spread over ranks."""
        self._bind()

    def _bind(self) -> None:
        self.sink_kind = self.finding.sink.kind
        self.sink_is_transformed = bool(self.finding.sink.transforms)
        source = self.finding.sink.source
        self.sink_parameter = source or ""
        self._get_sink = operator.attrgetter(source) if source else None
        self.registered = registered_values(self)
        self._selected: dict[Needs, registry.Backend] = {}
        self._number = next(_NUMBERS)
        _LIVE[self._number] = self

    def __getstate__(self) -> dict[str, Any]:
        # A weak reference survives neither pickle nor deepcopy; the owner itself does, and copies along.
        state = {k: v for k, v in self.__dict__.items() if k not in ("_get_sink", "_selected")}
        return {**state, "_owner": self._owner()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._owner = weakref.ref(state["_owner"])
        self._bind()

    @property
    def owner(self) -> nn.Module:
        """The model's attention module."""
        owner = self._owner()
        if owner is None:
            raise SinkError("the attention module that this Attention belongs to is gone", where=self.path)
        return owner

    @property
    def sinks(self) -> Tensor | None:
        """The live sink, [num_heads of this rank]; None where the layer has none or computes it for each token."""
        if self._get_sink is None:
            return None
        try:
            sinks: Tensor | None = self._get_sink(self.owner)
        except AttributeError:
            return None
        to_local = getattr(sinks, "to_local", None)
        return to_local() if to_local is not None else sinks

    def extra_repr(self) -> str:
        scale = self.registered.get("scaling", "at run time")
        return f"scale={scale}, sink={self.sink_kind.value}, backend={self.backend!r}"

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Run one interface call.

        Args:
            query: [batch, num_heads, q_length, qk_head_dim].
            key: [batch, num_kv_heads, kv_length, qk_head_dim].
            value: [batch, num_kv_heads, kv_length, v_head_dim].
            attention_mask: a LazyMask, a 4D tensor (bool: True is visible; float: added), or None.
            kwargs: every keyword of the interface call.

        Returns:
            output [batch, q_length, num_heads, v_head_dim], and the weights when `output_attentions` asks for them.
        """
        module = self.owner
        sink = kwargs.get("s_aux")
        if kwargs.get("sinks") is not None:
            if sink is not None:
                raise SinkError("the call passes two sinks, s_aux= and sinks=", where=where(module, self))
            sink = kwargs["sinks"]
        if self.recorded is None:
            self._record(module, sink, kwargs)
        check_sinks(module, self, sink)
        check_heads(module, self, query, sink)
        check_call(module, self, kwargs)
        if self.context is not None:
            return self.context.attend(self, (query, key, value), attention_mask, sink, kwargs), None
        attended = self.run(build_call(module, self, (query, key, value), attention_mask, sink, kwargs))
        return attended.output, attended.weights

    def run(self, call: AttentionCall) -> Attended:
        """The call on the backend that was chosen for its needs."""
        if torch.compiler.is_compiling():
            return registry.get(_name_in_graph(self._number, *key_of(call))).attend(call)
        needs = Needs.of(call)
        backend = self._selected.get(needs)
        if backend is None:
            backend = registry.select(self.backend, needs)
            self._selected[needs] = backend
            self.chosen[needs] = backend.name
        return backend.attend(call)

    def _record(self, module: nn.Module, sink: Tensor | None, kwargs: dict[str, Any]) -> None:
        """Take down the first call; where the source could not tell the sink, the call decides."""
        if self.finding.sink.kind is SinkKind.NONE and sink is not None and self._sink_is_unknown():
            self._adopt(module, sink)
        if self.sink_is_transformed and self.finding.sink.exact and sink is not None and not sink.is_meta:
            self._compare_values(module, sink)
        shapes = {n: list(v.shape) if isinstance(v, Tensor) else v for n, v in kwargs.items() if v is not None}
        self.recorded = shapes

    def _sink_is_unknown(self) -> bool:
        arguments = self.finding.arguments
        return any(n in arguments and arguments[n].status is Status.DYNAMIC for n in ("s_aux", "sinks"))

    def _adopt(self, module: nn.Module, sink: Tensor) -> None:
        if any(hasattr(p, "device_mesh") for p in module.parameters()):
            raise SinkError(
                "the source does not tell this layer's sink, and its weights are sharded", where=where(module, self)
            )
        source = next((n for n, p in module.named_parameters() if p is sink), None)
        if source is None and sink.dim() != 4:
            raise SinkError("the sink of this call is no parameter of the module", where=where(module, self))
        kind = SinkKind.PER_HEAD if source else SinkKind.PER_TOKEN
        spec = replace(self.finding.sink, kind=kind, source=source, shape=tuple(sink.shape), dtype=sink.dtype)
        self.finding = replace(self.finding, sink=spec)
        self._bind()

    def _compare_values(self, module: nn.Module, sink: Tensor) -> None:
        registered = self.sinks
        if registered is None or sink.numel() != registered.numel():
            return  # check_sinks says so
        if not torch.equal(sink.detach().flatten().float(), registered.detach().flatten().to(sink.dtype).float()):
            raise SinkError(
                f"the sink that the call passes ({self.finding.sink.expression}) has other values than "
                f"{self.finding.sink.source}",
                where=where(module, self),
            )


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _name_in_graph(number: int, *key: Any) -> str:
    """The backend that a layer's call runs on, chosen while the graph is traced."""
    attn, needs = _LIVE[number], Needs.from_key(*key)
    backend = registry.select(attn.backend, needs, traced=True)
    attn.chosen[needs] = backend.name
    return backend.name


def registered_attention(module: nn.Module) -> Attention | None:
    """The Attention below `module`, or None when it has not been adapted."""
    for name in NAMES:
        found = module._modules.get(name)
        if isinstance(found, Attention):
            return found
    return None


def put(module: nn.Module, finding: LayerFinding, backend: str, path: str) -> tuple[str, Attention] | None:
    """Register a new Attention below `module`; it and its name, or None when the module uses both names itself."""
    name = next((n for n in NAMES if not hasattr(module, n)), None)
    if name is None:
        return None
    attn = Attention(module, finding, backend, path)
    attn.train(module.training)
    module.add_module(name, attn)
    return name, attn


def attach(module: nn.Module, backend: str = "auto", path: str = "") -> Attention:
    """Register an Attention below `module`; the same one when there is one already.

    Raises:
        SinkholdError: the module's source or its call has no safe meaning.
    """
    with _ATTACHING:
        attn = registered_attention(module)
        if attn is None:
            finding = FUSER.validate(module)
            added = put(module, finding, backend, path)
            if added is None:
                raise CallError(f"both {' and '.join(NAMES)} are taken", where=finding.attention.where)
            _, attn = added
        return attn


def sinkhold_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """The function registered in `transformers.AttentionInterface`; shapes as in `Attention.forward`."""
    for name, given in zip(("scaling", "dropout"), args, strict=False):
        kwargs[name] = given
    if len(args) > 2:
        raise CallError(f"the call passes {len(args) + 5} positional arguments", where=type(module).__name__)
    attn = registered_attention(module) or attach(module)
    outputs: tuple[Tensor, Tensor | None] = attn(query, key, value, attention_mask, **kwargs)
    return outputs
