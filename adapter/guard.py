"""The guard: what a model hands to its attention is applied, equal to what is registered, or an error."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from fusers.base import SinkKind, Status

from .errors import CallError, SinkError

if TYPE_CHECKING:
    from .attention import Attention

CONSUMED = frozenset(
    {
        "s_aux", "sinks", "scaling", "sliding_window", "softcap", "dropout", "is_causal", "position_bias", "indices",
        "position_ids", "output_attentions", "cu_seq_lens_q", "cu_seq_lens_k", "attention_mask",
    }
)  # fmt: skip
"""Keywords that the adapter's attention uses."""

IGNORABLE = frozenset(
    {
        "use_cache", "output_hidden_states", "output_router_logits", "return_dict", "cache_position", "deterministic",
        "num_items_in_batch", "logits_to_keep", "max_length_q", "max_length_k", "cache", "past_key_values",
        "position_embeddings", "layer_idx", "is_decoding", "token_type_ids", "inference_params",
        "shift_labels",
    }
)  # fmt: skip
"""Keywords that do not change what attention computes: bookkeeping of the model around it."""

_KNOWN = CONSUMED | IGNORABLE
_REGISTERED = ("sliding_window", "softcap", "is_causal")


def where(module: nn.Module, attn: Attention) -> str:
    """Module path, class and file:line of the interface call, for error texts."""
    return f"{attn.path or type(module).__name__}, {attn.finding.attention.where}"


def check_sinks(module: nn.Module, attn: Attention, s_aux: Tensor | None) -> None:
    """Raise SinkError when `s_aux` is not the sink that `attn` applies.

    Args:
        module: the model's attention module.
        attn: its registered Attention.
        s_aux: the sink of this call: [num_heads], or [batch, num_heads, q_length, 1], or None.

    Compares identity and shape only, so that it never waits for a device.
    """
    kind = attn.sink_kind
    if kind is SinkKind.PER_HEAD:
        # The plain case, a parameter of the module itself, without the slower attribute lookup of nn.Module.
        if s_aux is None or s_aux is not module._parameters.get(attn.sink_parameter):
            _check_per_head(module, attn, s_aux, attn.sinks)
    elif kind is SinkKind.PER_TOKEN:
        if s_aux is None:
            raise SinkError(
                f"a per-token sink is registered ({attn.finding.sink.expression}), but the call passes none",
                where=where(module, attn),
            )
        if s_aux.dim() != 4 or s_aux.shape[-1] != 1:
            raise SinkError(
                f"a per-token sink has shape [batch, heads, queries, 1], but the call passes {list(s_aux.shape)}",
                where=where(module, attn),
            )
    elif s_aux is not None:
        raise SinkError(
            f"the call passes a sink of shape {list(s_aux.shape)}, but none is registered for this layer",
            where=where(module, attn),
        )


def _check_per_head(module: nn.Module, attn: Attention, s_aux: Tensor | None, registered: Tensor | None) -> None:
    spec = attn.finding.sink
    if s_aux is registered and s_aux is not None:
        return
    if s_aux is None:
        raise SinkError(
            f"the sink {spec.source or spec.expression} is registered, but the call passes none",
            where=where(module, attn),
        )
    if registered is None:
        raise SinkError(
            f"the call passes a sink of shape {list(s_aux.shape)}, but {spec.source} is gone from the module",
            where=where(module, attn),
        )
    if s_aux.numel() != registered.numel():
        raise SinkError(
            f"the call passes {s_aux.numel()} sinks, but {registered.numel()} are registered ({spec.source})",
            where=where(module, attn),
        )
    # A sink that is reshaped or cast on its way is another tensor each time; its values are compared at the first call.
    if not attn.sink_is_transformed and not _same_storage(s_aux, registered):
        raise SinkError(
            f"the call passes another tensor than the registered sink {spec.source}",
            where=where(module, attn),
        )


def _same_storage(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata and a.storage_offset() == b.storage_offset()


def check_heads(module: nn.Module, attn: Attention, query: Tensor, s_aux: Tensor | None) -> None:
    """Raise SinkError when the sink's heads are not the query's heads (a shard of one and not of the other).

    Likewise for a sink without values: torch answers an operator that gets one meta tensor with unwritten memory.
    """
    if s_aux is None:
        return
    if s_aux.is_meta and not query.is_meta:
        raise SinkError(
            f"the sink of this call is on the meta device, the query on {query.device}",
            where=where(module, attn),
            why="its values were never loaded, or the hook that brings them is gone",
            fix="load the sinks with adapter's or transformers' from_pretrained, and keep accelerate's hooks",
        )
    heads = s_aux.numel() if s_aux.dim() != 4 else s_aux.shape[1]
    if heads != query.shape[1]:
        raise SinkError(
            f"{heads} sinks for {query.shape[1]} query heads",
            where=where(module, attn),
            why="a sink that is broadcast or cut belongs to another head",
            fix="shard the sinks with the query heads: both colwise, or neither",
        )


def check_call(module: nn.Module, attn: Attention, kwargs: dict[str, Any]) -> None:
    """Raise CallError for a keyword that is neither consumed nor ignorable, or that differs from what is registered.

    Args:
        kwargs: every keyword of the interface call, None values included.
    """
    for name, value in kwargs.items():
        if name not in _KNOWN and value is not None:
            raise CallError(
                f"the model passes {name}= to its attention, which no backend here applies", where=where(module, attn)
            )
    for name, registered in attn.registered.items():
        if name in kwargs and kwargs[name] != registered:
            raise CallError(
                f"the call passes {name}={kwargs[name]!r}, but {registered!r} is registered for this layer",
                where=where(module, attn),
                fix="adapt the model again after changing it",
            )


def registered_values(attn: Attention) -> dict[str, Any]:
    """The keywords whose value was found in the source and must come again at each call."""
    finding = attn.finding
    found = {n: v.value for n, v in finding.arguments.items() if n in _REGISTERED and v.status is Status.RESOLVED}
    if finding.scaling.status is Status.RESOLVED:
        found["scaling"] = finding.scaling.value
    return found
