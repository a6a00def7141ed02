"""Which fields of a Visibility a mask function of transformers stands for, outside and inside of traced graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import CodeType
from typing import Any

import torch
from torch import Tensor
from transformers import masking_utils as hf

MaskFunction = Callable[..., Any]
"""(batch, head, query, key) indices -> whether the key is visible."""


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


class Unclassified(Exception):
    """A mask function that has no name here; it is then computed in full."""


class _Traced:
    """A mask function in a traced graph, where a closure cannot be looked into; `fields` is None when it has no name.

    In graphs, and only there, transformers' factories make these.
    """

    def __init__(self, fields: dict[str, Any] | None, function: MaskFunction) -> None:
        self.fields, self._function = fields, function

    def __call__(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Any:
        return self._function(batch, head, query, key)


def classify(function: MaskFunction) -> dict[str, Any]:
    """The Visibility fields that a mask function of transformers stands for; raises Unclassified for any other."""
    fields = _fields(function)
    if "remapped" in fields:
        raise Unclassified("positions remapped without documents")
    if "padding" in fields:
        raise Unclassified("padding inside the mask function")
    return fields


def _fields(function: MaskFunction) -> dict[str, Any]:
    """As `classify`, with "remapped" for positions that count from the start of each document."""
    if function is hf.causal_mask_function:
        return {"right": 0}
    if function is hf.bidirectional_mask_function:
        return {}
    if isinstance(function, _Traced):
        if function.fields is None:
            raise Unclassified("a traced function")
        return function.fields
    code = getattr(function, "__code__", None)
    if code is None or code not in (_AND, _SLIDING, _SLIDING_BOTH_WAYS, _CHUNKED, _PADDING, _DOCUMENTS, _REMAPPED):
        raise Unclassified("a function of the model's own")
    if torch.compiler.is_compiling():
        raise Unclassified("a closure in a traced graph")
    cells = _cells(function)
    if code is _AND:
        return _all_of(cells["mask_functions"])
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
    return _remapped(cells["mask_function"])


def _cells(function: MaskFunction) -> dict[str, Any]:
    return dict(zip(function.__code__.co_freevars, (c.cell_contents for c in function.__closure__ or ()), strict=True))


def _tighter(a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else min(a, b)


def _all_of(functions: Iterable[MaskFunction]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for function in functions:
        for name, value in _fields(function).items():
            if name in merged and name not in ("left", "right"):
                raise Unclassified(name)
            merged[name] = _tighter(merged[name], value) if name in merged else value
    if "documents" in merged:
        merged.pop("remapped", None)
    return merged


def _remapped(function: MaskFunction) -> dict[str, Any]:
    fields = _fields(function)
    # Inside a document positions run by one: their differences are those of indices. That does not hold for chunks.
    if fields.keys() - {"left", "right"}:
        raise Unclassified("chunks of remapped positions")
    return {**fields, "remapped": True}


def _traced(read: Callable[[Any], dict[str, Any]], argument: Any, function: MaskFunction) -> _Traced:
    try:
        return _Traced(read(argument), function)
    except Unclassified:
        return _Traced(None, function)


def _window(sliding_window: int) -> _Traced:
    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return key > query - sliding_window

    return _Traced({"left": sliding_window - 1}, visible)


def _documents(packed_sequence_mask: Tensor) -> _Traced:
    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return packed_sequence_mask[batch, query] == packed_sequence_mask[batch, key]

    return _Traced({"documents": packed_sequence_mask}, visible)


def _remap_positions(mask_function: MaskFunction, position_ids: Tensor) -> _Traced:
    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Any:
        return mask_function(batch, head, position_ids[batch, query], position_ids[batch, key])

    return _traced(_remapped, mask_function, visible)


def _both(*mask_functions: MaskFunction) -> _Traced:
    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = query.new_ones((), dtype=torch.bool)
        for function in mask_functions:
            seen = seen & function(batch, head, query, key).to(seen.device)
        return seen

    return _traced(_all_of, mask_functions, visible)


for _factory, _stand_in in (
    (hf.sliding_window_overlay, _window),
    (hf.packed_sequence_mask_function, _documents),
    (hf.and_masks, _both),
    (_remap, _remap_positions),
):
    if _factory is not None:
        # Parameters keep transformers' names, which callers may use; only the annotations differ.
        torch.compiler.substitute_in_graph(_factory, skip_signature_check=True)(_stand_in)
