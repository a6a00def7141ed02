"""What a model's mask means, without a q_length x kv_length tensor where none is needed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import masking_utils as hf

from .backends.call import Visibility
from .mask_functions import MaskFunction, Unclassified, classify

SPREAD: ContextVar[Callable[[Visibility], Visibility] | None] = ContextVar("SPREAD", default=None)
"""Set while the sequence of a forward is spread over ranks: gives a rank's mask its place in the whole sequence."""


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
    return torch.compiler.is_compiling() or isinstance(tensor, torch._subclasses.FakeTensor) or tensor.is_meta


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
    try:
        return _named(batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask)
    except Unclassified:
        dense = hf.sdpa_mask(
            batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset,
            mask_function=mask_function, attention_mask=attention_mask, allow_is_causal_skip=False,
            allow_is_bidirectional_skip=False, use_vmap=use_vmap, device=device,
        )  # fmt: skip
        return Visibility(batch_size, q_length, kv_length, q_offset, kv_offset, dense=dense)


def _named(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor,
    kv_offset: int,
    mask_function: MaskFunction,
    attention_mask: Tensor | None,
) -> Visibility:
    fields = classify(mask_function)
    if isinstance(q_offset, Tensor):
        q_offset = q_offset.clone()  # a static cache counts on in this very tensor before attention reads it
    padding = _key_padding(attention_mask, kv_length, kv_offset, fields.get("right") == 0)
    return Visibility(batch_size, q_length, kv_length, q_offset, kv_offset, padding=padding, **fields)


@dataclass(frozen=True, eq=False)
class Meaning:
    """What a mask tensor of a traced graph stands for, kept on the tensor as `sinkhold_meaning`.

    Whatever a model computes from the tensor is another tensor, which has none.
    """

    visibility: Visibility
    packable: bool


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
    _computed: list[Tensor]
    """the mask itself once it was asked for; one list for a mask and its aliases"""

    @staticmethod
    def __new__(
        cls, visibility: Visibility, dtype: torch.dtype, device: torch.device | str, packable: bool
    ) -> LazyMask:
        shape = (visibility.batch_size, 1, visibility.q_length, visibility.kv_length)
        with torch.inference_mode(False):
            mask: LazyMask = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=torch.device(device))
        mask.visibility, mask.packable, mask.packed, mask._computed = visibility, packable, None, []
        return mask

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"LazyMask({self.visibility}, dtype={self.dtype})"

    def additive(self) -> Tensor:
        """The mask as a plain tensor of its own memory, computed once."""
        if not self._computed:
            with torch.inference_mode(False):  # an inference tensor counts no writes
                self._computed.append(additive_mask(self.visibility, self.dtype, self.device).contiguous())
        return self._computed[0]

    @property
    def written(self) -> bool:
        """True when something changed the mask, or a view of it, in place: `additive` alone holds what it is."""
        # Views share the version of what they were taken from. In a graph it is not known while tracing.
        return not torch.compiler.is_compiling() and self._version > 0

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
    if not args or not isinstance(args[0], LazyMask) or args[0].written:
        return None
    mask = args[0]
    if func in (aten.detach.default, aten.alias.default, aten.clone.default):
        moved = LazyMask(mask.visibility, mask.dtype, mask.device, mask.packable)
        if func is not aten.clone.default:
            moved._computed = mask._computed
        return moved
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
        # A graph takes plain tensors; transformers' own builder is written to be traced. What nobody reads of the
        # tensor falls out of the graph.
        traced: Tensor | None = hf.eager_mask(
            batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset,
            mask_function=mask_function, attention_mask=attention_mask, dtype=dtype, device=device, use_vmap=use_vmap,
            allow_is_bidirectional_skip=allow_is_bidirectional_skip,
        )  # fmt: skip
        if traced is not None:
            with contextlib.suppress(Unclassified):  # then attention reads the tensor itself
                traced.sinkhold_meaning = Meaning(  # type: ignore[attr-defined]
                    _named(batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask),
                    _packable(q_length, kv_length, q_offset, attention_mask),
                )
        return traced
    visibility = visibility_of(
        batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset,
        mask_function=mask_function, attention_mask=attention_mask, device=device, use_vmap=use_vmap,
    )  # fmt: skip
    spread = SPREAD.get()
    if spread is not None:
        return LazyMask(spread(visibility), dtype, device, packable=False)
    if allow_is_bidirectional_skip and visibility.is_full and attention_mask is not None:
        return None
    on_device = isinstance(q_offset, Tensor)
    # One query over a static cache may enter a compiled graph, which takes plain tensors only; the tensor is small.
    if on_device and q_length == 1:
        return additive_mask(visibility, dtype, torch.device(device))
    return LazyMask(visibility, dtype, device, _packable(q_length, kv_length, q_offset, attention_mask))


def _packable(q_length: int, kv_length: int, q_offset: int | Tensor, attention_mask: Tensor | None) -> bool:
    whole = not isinstance(q_offset, Tensor) and q_offset == 0 and q_length == kv_length
    return whole and attention_mask is None
