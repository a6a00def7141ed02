"""What a model's mask means, without a q_length x kv_length tensor where none is needed."""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType
from typing import Any

import torch
from torch import Tensor
from transformers import masking_utils as hf

from .backends.call import Visibility

MaskFunction = Callable[..., Any]


def _code(factory: Callable[..., MaskFunction], *args: Any) -> CodeType:
    return factory(*args).__code__


# A closure's code object is shared by all closures of its factory, so it names the factory whatever the arguments were.
_AND = _code(hf.and_masks, hf.causal_mask_function)
_SLIDING = _code(hf.sliding_window_overlay, 1)
_SLIDING_BOTH_WAYS = _code(hf.sliding_window_bidirectional_overlay, 1)
_CHUNKED = _code(hf.chunked_overlay, 1, None)
_PADDING = _code(hf.padding_mask_function, None)
_DOCUMENTS = _code(hf.packed_sequence_mask_function, None)
# transformers < 5.19 has no such factory.
_remap = getattr(hf, "remap_positions_for_packed_sequence", None)
_REMAPPED = _code(_remap, hf.causal_mask_function, None) if _remap else None


class _Unclassified(Exception):
    """A mask function that has no name here; it is then computed in full."""


def _cells(function: MaskFunction) -> dict[str, Any]:
    return dict(zip(function.__code__.co_freevars, (c.cell_contents for c in function.__closure__ or ()), strict=True))


def _tighter(a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else min(a, b)


def _merge(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    merged = {**a, **b}
    for name in a.keys() & b.keys():
        if name not in ("left", "right"):
            raise _Unclassified(name)
        merged[name] = _tighter(a[name], b[name])
    return merged


def classify(function: MaskFunction) -> dict[str, Any]:
    """The Visibility fields that a mask function of transformers stands for; raises _Unclassified for any other."""
    if function is hf.causal_mask_function:
        return {"right": 0}
    if function is hf.bidirectional_mask_function:
        return {}
    code = getattr(function, "__code__", None)
    if code is None or code not in (_AND, _SLIDING, _SLIDING_BOTH_WAYS, _CHUNKED, _PADDING, _DOCUMENTS, _REMAPPED):
        raise _Unclassified(repr(function))
    cells = _cells(function)
    if code is _AND:
        fields: dict[str, Any] = {}
        for part in cells["mask_functions"]:
            fields = _merge(fields, classify(part))
        if fields.pop("remapped", False) and "documents" not in fields:
            raise _Unclassified("positions remapped without documents")
        return fields
    if code is _SLIDING:
        return {"left": cells["sliding_window"] - 1}
    if code is _SLIDING_BOTH_WAYS:
        return {"left": cells["sliding_window"], "right": cells["sliding_window"]}
    if code is _CHUNKED:
        return {"chunk_size": cells["chunk_size"], "chunk_start": cells["left_padding"]}
    if code is _PADDING:
        return {"padding": cells["padding_mask"]}
    if code is _DOCUMENTS:
        return {"documents": cells["packed_sequence_mask"]}
    # Inside a document positions run by one: their differences are those of indices. That does not hold for chunks.
    inner = classify(cells["mask_function"])
    if inner.keys() - {"left", "right"}:
        raise _Unclassified("chunks of remapped positions")
    return {**inner, "remapped": True}


def _key_padding(mask: Tensor | None, kv_length: int, kv_offset: int, causal: bool) -> Tensor | None:
    """[batch, kv_length] bool of real keys, or None when every key that a query can reach is real."""
    if mask is None:
        return None
    seen = mask[:, kv_offset : kv_offset + kv_length]
    unwritten = kv_length - seen.shape[1]
    # Slots past the 2D mask lie after every query, so causality hides them already.
    if (unwritten == 0 or causal) and not _is_traced(seen) and bool(seen.all()):
        return None
    return torch.nn.functional.pad(seen, (0, unwritten)) if unwritten else seen


def _is_traced(tensor: Tensor) -> bool:
    return isinstance(tensor, torch._subclasses.FakeTensor) or tensor.is_meta


def visibility_of(
    *,
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction = hf.causal_mask_function,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    use_vmap: bool = False,
) -> Visibility:
    """The meaning of the arguments that transformers gives to a mask builder (`AttentionMaskInterface`).

    Args:
        attention_mask: [batch_size, seen] bool, True where the token is real; None for no padding.
        mask_function: transformers' predicate over (batch, head, query, key) positions.

    What cannot be classified is computed in full, never left out.
    """
    if isinstance(q_offset, Tensor):
        q_offset = q_offset.clone()  # a static cache counts on in this very tensor before attention reads it
    try:
        fields = classify(mask_function)
        extra_padding = fields.pop("padding", None)
        if extra_padding is not None:
            raise _Unclassified("padding inside the mask function")
    except _Unclassified:
        dense = hf.sdpa_mask(
            batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset,
            mask_function=mask_function, attention_mask=attention_mask, allow_is_causal_skip=False,
            allow_is_bidirectional_skip=False, use_vmap=use_vmap, device=device,
        )  # fmt: skip
        return Visibility(batch_size, q_length, kv_length, q_offset, kv_offset, dense=dense)
    padding = _key_padding(attention_mask, kv_length, kv_offset, fields.get("right") == 0)
    return Visibility(batch_size, q_length, kv_length, q_offset, kv_offset, padding=padding, **fields)


class LazyMask(Tensor):
    """The additive mask [batch, 1, q_length, kv_length] that transformers' eager attention expects, not yet computed.

    Any operation on it computes it (0 where visible, the dtype's minimum elsewhere) and goes on with that tensor, so
    model code that slices or extends its mask gets what it expects. The adapter's attention reads `visibility` instead.

    `packable` is True when the model's caller gave no padding mask and there is no cached key: then position ids that
    restart mean packed documents.
    """

    visibility: Visibility
    packable: bool
    packed: tuple[tuple[Any, Any], Visibility] | None
    """the visibility with packed documents added, for the position ids and cu_seq_lens that it was computed from"""
    _additive: Tensor | None

    @staticmethod
    def __new__(
        cls, visibility: Visibility, dtype: torch.dtype, device: torch.device | str, packable: bool
    ) -> LazyMask:
        shape = (visibility.batch_size, 1, visibility.q_length, visibility.kv_length)
        mask: LazyMask = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=torch.device(device))
        mask.visibility, mask.packable, mask.packed, mask._additive = visibility, packable, None, None
        return mask

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"LazyMask({self.visibility}, dtype={self.dtype})"

    def additive(self) -> Tensor:
        """The mask as a plain tensor, computed once."""
        if self._additive is None:
            self._additive = additive_mask(self.visibility, self.dtype, self.device)
        return self._additive

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        moved = _moved(func, args, kwargs)
        if moved is not None:
            return moved
        args, kwargs = torch.utils._pytree.tree_map_only(LazyMask, LazyMask.additive, (args, kwargs))
        return func(*args, **kwargs)


def _moved(func: Any, args: Any, kwargs: Any) -> LazyMask | None:
    """The lazy result of operations that only hand the mask on: detach, alias, a move to another device or dtype."""
    aten = torch.ops.aten
    if not args or not isinstance(args[0], LazyMask):
        return None
    mask = args[0]
    if func in (aten.detach.default, aten.alias.default, aten.clone.default):
        return LazyMask(mask.visibility, mask.dtype, mask.device, mask.packable)
    if func is aten._to_copy.default:
        dtype = kwargs.get("dtype") or mask.dtype
        if dtype.is_floating_point:
            return LazyMask(mask.visibility, dtype, kwargs.get("device") or mask.device, mask.packable)
    return None


def additive_mask(visibility: Visibility, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[batch, 1 or num_heads, q_length, kv_length] of `dtype`: 0 where visible, the dtype's minimum elsewhere."""
    visible = visibility.to_bool(device)
    shape = (visibility.batch_size, 1, visibility.q_length, visibility.kv_length)
    if visible is None:
        return torch.zeros(shape, dtype=dtype, device=device)
    zero = torch.zeros((), dtype=dtype, device=device)
    mask = torch.where(visible, zero, torch.finfo(dtype).min)
    return mask.expand(visibility.batch_size, -1, visibility.q_length, visibility.kv_length)


def sinkhold_mask(
    *,
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction = hf.causal_mask_function,
    attention_mask: Tensor | None = None,
    allow_is_bidirectional_skip: bool = False,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    use_vmap: bool = False,
    **_: Any,
) -> Tensor | None:
    """The mask builder registered in `transformers.AttentionMaskInterface`; None only where the model allows none."""
    if torch.compiler.is_compiling():
        # A graph takes plain tensors; transformers' own builder is written to be traced.
        traced: Tensor | None = hf.eager_mask(
            batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset,
            mask_function=mask_function, attention_mask=attention_mask, dtype=dtype, device=device, use_vmap=use_vmap,
            allow_is_bidirectional_skip=allow_is_bidirectional_skip,
        )  # fmt: skip
        return traced
    visibility = visibility_of(
        batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset,
        mask_function=mask_function, attention_mask=attention_mask, device=device, use_vmap=use_vmap,
    )  # fmt: skip
    if allow_is_bidirectional_skip and visibility.is_full and attention_mask is not None:
        return None
    on_device = isinstance(q_offset, Tensor)
    # One query over a static cache may enter a compiled graph, which takes plain tensors only; the tensor is small.
    if on_device and q_length == 1:
        return additive_mask(visibility, dtype, torch.device(device))
    packable = attention_mask is None and not on_device and q_offset == 0 and q_length == kv_length
    return LazyMask(visibility, dtype, device, packable)
