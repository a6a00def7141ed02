"""The kernels as torch operators `sinkhold::prefill`, `sinkhold::prefill_backward` and `sinkhold::decode`.

They are registered on the dispatcher directly: that costs a few microseconds less a call than a decorated Python
function.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import backward, decode, prefill
from .masking import Masking

_MASKING = (
    "Tensor? origin, Tensor? chunk_start, Tensor? documents, Tensor? query_documents, Tensor? padding, "
    "Tensor? dense, Tensor? bias, SymInt q_origin, SymInt kv_origin, SymInt back, SymInt ahead, SymInt chunk"
)
_FORWARD = (
    "(Tensor query, Tensor key, Tensor value, Tensor? sinks, float scale, float? softcap, "
    f"{_MASKING}) -> (Tensor, Tensor)"
)
_BACKWARD = (
    "(Tensor query, Tensor key, Tensor value, Tensor? sinks, Tensor out, Tensor lse, Tensor d_out, Tensor? d_lse, "
    f"float scale, float? softcap, {_MASKING}) -> (Tensor, Tensor, Tensor, Tensor)"
)
_library = torch.library.Library("sinkhold", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(f"prefill{_FORWARD}")  # type: ignore[no-untyped-call]
_library.define(f"decode{_FORWARD}")  # type: ignore[no-untyped-call]
_library.define(f"prefill_backward{_BACKWARD}")  # type: ignore[no-untyped-call]


def _masking(arguments: tuple[Any, ...], query: Tensor, key: Tensor) -> Masking:
    origin, chunk_start, documents, query_documents, *rest = arguments
    padding, dense, bias, q_origin, kv_origin, back, ahead, chunk = rest
    masking = Masking(
        q_origin, origin, kv_origin, back, ahead, chunk, chunk_start, documents, query_documents, padding,
        dense, bias,
    )  # fmt: skip
    return masking.expanded(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


def flat(masking: Masking) -> tuple[Any, ...]:
    """A masking as the trailing arguments of the operators."""
    return (
        masking.origin,
        masking.chunk_start,
        masking.documents,
        masking.query_documents,
        masking.padding,
        masking.dense,
        masking.bias,
        masking.q_origin,
        masking.kv_origin,
        masking.back,
        masking.ahead,
        masking.chunk,
    )


def _prefill(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, scale: float, softcap: float | None, *masking: Any
) -> tuple[Tensor, Tensor]:
    return prefill.attend(query, key, value, sinks, scale, softcap, _masking(masking, query, key))


def _decode(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, scale: float, softcap: float | None, *masking: Any
) -> tuple[Tensor, Tensor]:
    return decode.attend(query, key, value, sinks, scale, softcap, _masking(masking, query, key))


def _backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor,
    d_out: Tensor,
    d_lse: Tensor | None,
    scale: float,
    softcap: float | None,
    *masking: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    place = _masking(masking, query, key)
    dq, dk, dv, d_sinks = backward.gradients(query, key, value, sinks, out, lse, d_out, d_lse, scale, softcap, place)
    return dq, dk, dv, query.new_empty(0) if d_sinks is None else d_sinks


def _fake_forward(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    batch, num_heads, q_length = query.shape[:3]
    out = query.new_empty(batch, q_length, num_heads, value.shape[3])
    return out, query.new_empty(batch, num_heads, q_length, dtype=torch.float32)


def _fake_backward(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, *_: Any) -> tuple[Tensor, ...]:
    d_sinks = query.new_empty(0) if sinks is None else torch.empty_like(sinks)
    return backward.gradient_like(query), backward.gradient_like(key), backward.gradient_like(value), d_sinks


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, sinks, ctx.scale, ctx.softcap, *masking = inputs
    tensors, ctx.numbers = masking[:7], masking[7:]
    ctx.save_for_backward(query, key, value, sinks, *output, *tensors)
    ctx.set_materialize_grads(False)


def _autograd(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    query, key, value, sinks, out, lse, *tensors = ctx.saved_tensors
    if d_out is None:
        d_out = torch.zeros_like(out)
    dq, dk, dv, d_sinks = torch.ops.sinkhold.prefill_backward(
        query, key, value, sinks, out, lse, d_out, d_lse, ctx.scale, ctx.softcap, *tensors, *ctx.numbers
    )
    rest = (None,) * (2 + len(tensors) + len(ctx.numbers))
    return dq, dk, dv, None if sinks is None else d_sinks, *rest


for _name, _run, _fake in (
    ("prefill", _prefill, _fake_forward),
    ("decode", _decode, _fake_forward),
    ("prefill_backward", _backward, _fake_backward),
):
    for _key in ("CUDA", "CPU"):
        _library.impl(_name, _run, _key)  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"sinkhold::{_name}", _fake, lib=_library)
torch.library.register_autograd("sinkhold::prefill", _autograd, setup_context=_setup_context, lib=_library)
