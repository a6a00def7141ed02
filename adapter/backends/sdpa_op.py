"""`sdpa_math` as one differentiable torch op, opaque to torch.compile and cut into no graph of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import BackendError
from . import sdpa_math
from .call import AttentionCall, Visibility

_TENSORS = (
    "Tensor query, Tensor key, Tensor value, Tensor? sinks, Tensor? bias, Tensor? dense, Tensor? padding, "
    "Tensor? documents, Tensor? query_documents, Tensor? chunk_start, Tensor? offset"
)
_NUMBERS = "SymInt q_offset, SymInt kv_offset, SymInt? left, SymInt? right, SymInt? chunk_size, float scale"
_COUNT = 11


def arguments(call: AttentionCall) -> tuple[Any, ...]:
    """The fields of a call in the order of the op's schema."""
    v, offset = call.visibility, call.visibility.q_offset
    on_device = isinstance(offset, Tensor)
    tensors = (call.query, call.key, call.value, call.sinks, call.bias, v.dense, v.padding)
    positions = (v.documents, v.query_documents, v.chunk_start, offset if on_device else None)
    numbers = (0 if on_device else offset, v.kv_offset, v.left, v.right, v.chunk_size, call.scale)
    return (*tensors, *positions, *numbers)


def _call(*args: Any) -> AttentionCall:
    query, key, value, sinks, bias, dense, padding, documents, query_documents, chunk_start, offset = args[:_COUNT]
    q_offset, kv_offset, left, right, chunk_size, scale = args[_COUNT:]
    visibility = Visibility(
        batch_size=query.shape[0],
        q_length=query.shape[2],
        kv_length=key.shape[2],
        q_offset=q_offset if offset is None else offset,
        kv_offset=kv_offset,
        left=left,
        right=right,
        chunk_size=chunk_size,
        chunk_start=chunk_start,
        documents=documents,
        query_documents=query_documents,
        padding=padding,
        dense=dense,
    )
    return AttentionCall(query, key, value, scale, visibility, sinks=sinks, bias=bias)


def _forward(*args: Any) -> tuple[Tensor, Tensor]:
    return sdpa_math.forward(_call(*args))


def _backward(grad: Tensor, output: Tensor, lse_s: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return sdpa_math.backward(_call(*args), grad, output, lse_s)


def _fake_forward(*args: Any) -> tuple[Tensor, Tensor]:
    query, value = args[0], args[2]
    batch, num_heads, q_length, _ = query.shape
    lse_s = query.new_empty(batch, num_heads, q_length, dtype=sdpa_math.lse_dtype(query.dtype))
    return query.new_empty(batch, q_length, num_heads, value.shape[3]), lse_s


def _fake_backward(grad: Tensor, output: Tensor, lse_s: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    query, key, value, sinks = args[:4]
    d_sinks = lse_s.new_empty(0) if sinks is None else torch.empty_like(sinks)
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), d_sinks


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:_COUNT], *output)
    ctx.numbers = inputs[_COUNT:]


def _differentiate(ctx: Any, grad: Tensor, grad_lse: Tensor) -> tuple[Any, ...]:
    *tensors, output, lse_s = ctx.saved_tensors
    dq, dk, dv, d_sinks = attend_backward(grad, output, lse_s, *tensors, *ctx.numbers)
    absent = (None,) * (_COUNT - 4 + len(ctx.numbers))
    return (dq, dk, dv, None if tensors[3] is None else d_sinks, *absent)


def _refuse(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
    raise BackendError(
        "backend 'sdpa' has no second derivative",
        why="the attention ops of torch have none either; anything else would be silently wrong",
        fix='use backend="eager" or backend="reference"',
    )


_OUTPUTS = "-> (Tensor, Tensor)"
attend = torch.library.custom_op(
    "sinkhold::sdpa", _forward, mutates_args=(), schema=f"({_TENSORS}, {_NUMBERS}) {_OUTPUTS}"
)
attend_backward = torch.library.custom_op(
    "sinkhold::sdpa_backward",
    _backward,
    mutates_args=(),
    schema=f"(Tensor grad, Tensor output, Tensor lse_s, {_TENSORS}, {_NUMBERS}) -> (Tensor, Tensor, Tensor, Tensor)",
)
attend.register_fake(_fake_forward)
attend.register_autograd(_differentiate, setup_context=_setup)
attend_backward.register_fake(_fake_backward)
attend_backward.register_autograd(_refuse, setup_context=lambda ctx, inputs, output: None)
