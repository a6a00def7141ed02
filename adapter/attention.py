"""The registered submodule that runs a layer's attention, and the function that transformers calls."""

from __future__ import annotations

import operator
import threading
import weakref
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fusers.attention import AttentionFuser
from fusers.base import LayerFinding, SinkKind, Status

from .backends import registry
from .backends.call import AttentionCall, Visibility
from .backends.capability import Needs
from .errors import CallError, SinkError
from .guard import check_call, check_heads, check_sinks, registered_values, where
from .masks import LazyMask

NAMES = ("attn", "sinkhold_attn")
"""Where the submodule is put: the first name that the module does not use itself."""

_ATTACHING = threading.Lock()


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
        self.recorded: dict[str, Any] | None = None
        """What the first call passed; compared with the finding."""
        self._bind()

    def _bind(self) -> None:
        self.sink_kind = self.finding.sink.kind
        self.sink_is_transformed = bool(self.finding.sink.transforms)
        source = self.finding.sink.source
        self.sink_parameter = source or ""
        self._get_sink = operator.attrgetter(source) if source else None
        self.registered = registered_values(self)
        self._selected: dict[Needs, registry.Backend] = {}

    def __getstate__(self) -> dict[str, Any]:
        # A weak reference survives neither pickle nor deepcopy; the owner itself does, and copies along.
        state = {k: v for k, v in self.__dict__.items() if k not in ("_get_sink", "_selected")}
        return {**state, "_owner": self._owner()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
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
        call = build_call(module, self, (query, key, value), attention_mask, sink, kwargs)
        attended = self._backend_for(call).attend(call)
        return attended.output, attended.weights

    def _backend_for(self, call: AttentionCall) -> registry.Backend:
        needs = Needs.of(call)
        backend = self._selected.get(needs)
        if backend is None:
            backend = registry.select(self.backend, needs)
            self._selected[needs] = backend
            self.chosen[needs] = backend.name
        return backend

    def _record(self, module: nn.Module, sink: Tensor | None, kwargs: dict[str, Any]) -> None:
        """Take down the first call; where the source could not tell the sink, the call decides."""
        if self.finding.sink.kind is SinkKind.NONE and sink is not None and self._sink_is_unknown():
            self._adopt(module, sink)
        if self.sink_is_transformed and sink is not None and not sink.is_meta:
            self._compare_values(module, sink)
        shapes = {n: list(v.shape) if isinstance(v, Tensor) else v for n, v in kwargs.items() if v is not None}
        self.recorded = shapes

    def _sink_is_unknown(self) -> bool:
        arguments = self.finding.arguments
        return any(n in arguments and arguments[n].status is Status.DYNAMIC for n in ("s_aux", "sinks"))

    def _adopt(self, module: nn.Module, sink: Tensor) -> None:
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


def build_call(
    module: nn.Module,
    attn: Attention,
    qkv: tuple[Tensor, Tensor, Tensor],
    attention_mask: Any,
    sink: Tensor | None,
    kwargs: dict[str, Any],
) -> AttentionCall:
    """The interface call in the backends' terms; raises CallError for a mask that has no meaning here."""
    query, key, value = qkv
    visibility, bias = _visibility(module, attn, query, key, attention_mask, kwargs)
    if kwargs.get("indices") is not None:
        visibility = _select_indices(visibility, kwargs["indices"], key.shape[2])
    position_bias = kwargs.get("position_bias")
    if position_bias is not None:
        bias = position_bias if bias is None else bias + position_bias
    scale, query = _scale(attn, query, kwargs)
    if sink is not None and sink.dim() != 4:
        sink = sink.reshape(-1)
    return AttentionCall(
        query=query, key=key, value=value, scale=scale, visibility=visibility, sinks=sink, bias=bias,
        softcap=kwargs.get("softcap"), dropout=(kwargs.get("dropout") or 0.0) if module.training else 0.0,
        need_weights=bool(kwargs.get("output_attentions")) or _config_wants_weights(module),
    )  # fmt: skip


def _config_wants_weights(module: nn.Module) -> bool:
    config = module.__dict__.get("config")
    # A config's own attribute lookup costs more than the whole guard, and this runs in every layer of every forward.
    return config is not None and bool(object.__getattribute__(config, "__dict__").get("_output_attentions"))


def _scale(attn: Attention, query: Tensor, kwargs: dict[str, Any]) -> tuple[float, Tensor]:
    scaling = kwargs.get("scaling")
    if scaling is None:
        # Absent and None mean the interface's documented default, which torch's attention shares.
        return query.shape[-1] ** -0.5, query
    if isinstance(scaling, Tensor):
        return 1.0, query * scaling
    return float(scaling), query


def _visibility(
    module: nn.Module, attn: Attention, query: Tensor, key: Tensor, mask: Any, kwargs: dict[str, Any]
) -> tuple[Visibility, Tensor | None]:
    q_length, kv_length = query.shape[2], key.shape[2]
    if mask is None:
        return _documents(_unmasked(query, kv_length, kwargs), kwargs, packable=q_length == kv_length), None
    if isinstance(mask, LazyMask):
        visibility = mask.visibility
        if (visibility.q_length, visibility.kv_length) != (q_length, kv_length):
            raise CallError(
                f"the mask is for {visibility.q_length} queries and {visibility.kv_length} keys, the call has {q_length} and {kv_length}",
                where=where(module, attn),
            )
        if not mask.packable:
            return visibility, None
        # All layers get the same mask and position ids; whether they restart is looked up once a forward.
        given = (kwargs.get("position_ids"), kwargs.get("cu_seq_lens_k"))
        if mask.packed is None or any(a is not b for a, b in zip(mask.packed[0], given, strict=True)):
            mask.packed = (given, _documents(visibility, kwargs, packable=True))
        return mask.packed[1], None
    if not isinstance(mask, Tensor) or mask.dim() != 4:
        shape = f" of shape {list(mask.shape)}" if hasattr(mask, "shape") else ""
        raise CallError(
            f"the mask is a {type(mask).__name__}{shape}, which has no meaning here",
            where=where(module, attn),
            fix="pass a 2D padding mask to the model, or a 4D bool or float mask",
        )
    full = Visibility(query.shape[0], q_length, kv_length)
    if mask.shape[-1] != kv_length or mask.shape[-2] not in (1, q_length):
        raise CallError(
            f"the mask has shape {list(mask.shape)}, the call has {q_length} queries and {kv_length} keys",
            where=where(module, attn),
        )
    if mask.dtype == torch.bool:
        return full.with_(dense=mask), None
    visible = mask > torch.finfo(mask.dtype).min / 2
    return full.with_(dense=visible), mask.masked_fill(~visible, 0)


def _unmasked(query: Tensor, kv_length: int, kwargs: dict[str, Any]) -> Visibility:
    """Without a mask the model means 'all keys', unless it says is_causal or a window that is shorter than the keys."""
    batch, _, q_length, _ = query.shape
    window = kwargs.get("sliding_window")
    causal = bool(kwargs.get("is_causal")) and q_length > 1
    left = window - 1 if window is not None and window < kv_length else None
    return Visibility(batch, q_length, kv_length, kv_length - q_length, 0, left=left, right=0 if causal else None)


def _documents(visibility: Visibility, kwargs: dict[str, Any], packable: bool) -> Visibility:
    """Packed documents, from cu_seq_lens or from position ids that restart, where the mask does not carry them already."""
    if visibility.documents is not None or visibility.dense is not None or not packable:
        return visibility
    boundaries = kwargs.get("cu_seq_lens_k")
    if boundaries is not None and isinstance(boundaries, Tensor):
        positions = torch.arange(visibility.kv_length, device=boundaries.device)
        documents = torch.searchsorted(boundaries[1:].to(positions.dtype), positions, right=True)
        return visibility.with_(documents=documents.expand(visibility.batch_size, -1))
    position_ids = kwargs.get("position_ids")
    if position_ids is None or kwargs.get("use_cache") or position_ids.dim() != 2:
        return visibility
    if position_ids.shape[1] != visibility.q_length or torch.compiler.is_compiling():
        return visibility
    documents = _restarts(position_ids)
    return visibility if documents is None else visibility.with_(documents=documents.expand(visibility.batch_size, -1))


def _restarts(position_ids: Tensor) -> Tensor | None:
    """[batch, length] document numbers, or None when positions run on by one everywhere."""
    if position_ids.is_meta:
        return None
    jumps = position_ids.diff(dim=-1) != 1
    if not bool(jumps.any()):
        return None
    return torch.nn.functional.pad(jumps.cumsum(-1), (1, 0))


def _select_indices(visibility: Visibility, indices: Tensor, kv_length: int) -> Visibility:
    """Only the keys that `indices` [batch, q_length, top_k] names are visible."""
    shape = (*indices.shape[:2], kv_length)
    chosen = torch.zeros(shape, dtype=torch.bool, device=indices.device).scatter(-1, indices.long(), True)[:, None]
    dense = chosen if visibility.dense is None else visibility.dense & chosen
    return visibility.with_(dense=dense)


def registered_attention(module: nn.Module) -> Attention | None:
    """The Attention below `module`, or None when it has not been adapted."""
    for name in NAMES:
        found = module._modules.get(name)
        if isinstance(found, Attention):
            return found
    return None


def attach(module: nn.Module, backend: str = "auto", path: str = "") -> Attention:
    """Register an Attention below `module`; the same one when there is one already.

    Raises:
        SinkholdError: the module's source or its call has no safe meaning.
    """
    with _ATTACHING:
        attn = registered_attention(module)
        if attn is None:
            finding = AttentionFuser().validate(module)
            attn = Attention(module, finding, backend, path)
            name = next((n for n in NAMES if not hasattr(module, n)), None)
            if name is None:
                raise CallError(f"both {' and '.join(NAMES)} are taken", where=finding.attention.where)
            module.add_module(name, attn)
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
