"""An interface call in the backends' terms: what its mask, keywords and sink mean."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from fusers.source import read_forward

from .backends.call import AttentionCall, Visibility
from .errors import CallError
from .guard import where
from .masks import LazyMask

if TYPE_CHECKING:
    from .attention import Attention

_REWRITES: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()


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
    if not query.dtype == key.dtype == value.dtype:
        query, key, value = _one_dtype(module, attn, qkv)
    scale, query = _scale(attn, query, kwargs)
    if sink is not None and sink.dim() != 4:
        sink = sink.reshape(-1)
    return AttentionCall(
        query=query, key=key, value=value, scale=scale, visibility=visibility, sinks=sink, bias=bias,
        softcap=kwargs.get("softcap"), dropout=(kwargs.get("dropout") or 0.0) if module.training else 0.0,
        need_weights=bool(kwargs.get("output_attentions")) or _config_wants_weights(module),
    )  # fmt: skip


def _one_dtype(module: nn.Module, attn: Attention, qkv: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Rotary embeddings leave query and key in float32 under autocast; its matrix products would cast them."""
    device = qkv[0].device.type
    if not torch.is_autocast_enabled(device):
        raise CallError(
            f"query, key and value are {', '.join(str(t.dtype).removeprefix('torch.') for t in qkv)}",
            where=where(module, attn),
            fix="cast the model to one dtype, or run it under torch.autocast",
        )
    dtype = torch.get_autocast_dtype(device)
    return qkv[0].to(dtype), qkv[1].to(dtype), qkv[2].to(dtype)


def _config_wants_weights(module: nn.Module) -> bool:
    if torch.compiler.is_compiling():
        return bool(getattr(getattr(module, "config", None), "output_attentions", False))
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
    meaning = getattr(mask, "sinkhold_meaning", None) if attn.mask_is_kept else None
    if meaning is not None and (meaning.visibility.q_length, meaning.visibility.kv_length) == (q_length, kv_length):
        return _documents(meaning.visibility, kwargs, packable=meaning.packable), None
    if isinstance(mask, LazyMask) and mask.written:
        mask = mask.additive()
    if isinstance(mask, LazyMask):
        visibility = mask.visibility
        if (visibility.q_length, visibility.kv_length) != (q_length, kv_length):
            raise CallError(
                f"the mask is for {visibility.q_length} queries and {visibility.kv_length} keys, "
                f"the call has {q_length} and {kv_length}",
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
        if rewrites_mask(module):
            raise CallError(
                "the mask is bool, but this module extends its mask as if it were additive",
                where=where(module, attn),
                why="what it adds would be inverted: hidden keys would be seen and visible ones hidden",
                fix="pass a float mask: 0 where visible, the dtype's minimum elsewhere",
            )
        return full.with_(dense=mask), None
    visible = mask > torch.finfo(mask.dtype).min / 2
    if torch.compiler.is_compiling():
        visible = _split_documents(visible, q_length, kwargs)
    return full.with_(dense=visible), mask.masked_fill(~visible, 0)


def _unmasked(query: Tensor, kv_length: int, kwargs: dict[str, Any]) -> Visibility:
    """Without a mask the model means 'all keys', unless it says is_causal or a window that is shorter than the keys."""
    batch, _, q_length, _ = query.shape
    window = kwargs.get("sliding_window")
    causal = bool(kwargs.get("is_causal")) and q_length > 1
    left = window - 1 if window is not None and window < kv_length else None
    return Visibility(batch, q_length, kv_length, kv_length - q_length, 0, left=left, right=0 if causal else None)


def _documents(visibility: Visibility, kwargs: dict[str, Any], packable: bool) -> Visibility:
    """Packed documents, from cu_seq_lens or from position ids that restart, where the mask does not carry them."""
    if visibility.documents is not None or visibility.dense is not None or not packable:
        return visibility
    boundaries = kwargs.get("cu_seq_lens_k")
    if boundaries is not None and isinstance(boundaries, Tensor):
        positions = torch.arange(visibility.kv_length, device=boundaries.device)
        documents = torch.searchsorted(boundaries[1:].to(positions.dtype), positions, right=True)
        return visibility.with_(documents=documents.expand(visibility.batch_size, -1))
    jumps = _jumps(visibility.q_length, kwargs)
    if jumps is None or jumps.is_meta:
        return visibility
    # In a traced graph nothing can be looked up: documents are always told apart there.
    if not torch.compiler.is_compiling() and not bool(jumps.any()):
        return visibility
    return visibility.with_(documents=_numbered(jumps).expand(visibility.batch_size, -1))


def _jumps(q_length: int, kwargs: dict[str, Any]) -> Tensor | None:
    """[batch, q_length - 1] bool, True where a document ends; None without one position id for each query.

    Without a cache any step but one is an end, as in transformers' own rule; with a fresh cache only a step back is.
    """
    position_ids = kwargs.get("position_ids")
    if position_ids is None or position_ids.dim() != 2 or position_ids.shape[1] != q_length:
        return None
    steps: Tensor = position_ids.diff(dim=-1)
    return steps <= 0 if kwargs.get("use_cache") else steps != 1


def _numbered(jumps: Tensor) -> Tensor:
    return torch.nn.functional.pad(jumps.cumsum(-1), (1, 0))


def _split_documents(visible: Tensor, q_length: int, kwargs: dict[str, Any]) -> Tensor:
    """In a traced graph the mask is a tensor and nothing can be looked up: documents are always told apart there."""
    jumps = _jumps(q_length, kwargs)
    if jumps is None or q_length == 1 or visible.shape[-1] != q_length:
        return visible
    documents = _numbered(jumps)
    return visible & (documents[:, None, :, None] == documents[:, None, None, :])


def rewrites_mask(module: nn.Module) -> bool:
    """Whether the module's forward puts something else in its attention_mask before the call."""
    forward = type(module).forward
    if forward not in _REWRITES:  # every layer of every forward asks, and reading a source takes milliseconds
        tree = read_forward(type(module)).tree
        stored = (n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
        _REWRITES[forward] = "attention_mask" in stored
    return _REWRITES[forward]


def _select_indices(visibility: Visibility, indices: Tensor, kv_length: int) -> Visibility:
    """Only the keys that `indices` [batch, q_length, top_k] names are visible."""
    shape = (*indices.shape[:2], kv_length)
    chosen = torch.zeros(shape, dtype=torch.bool, device=indices.device).scatter(-1, indices.long(), True)[:, None]
    dense = chosen if visibility.dense is None else visibility.dense & chosen
    return visibility.with_(dense=dense)
