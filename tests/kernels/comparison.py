"""Random calls and their comparison with the reference backend in fp64."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from adapter.backends.call import AttentionCall, Visibility
from adapter.backends.reference import BACKEND as REFERENCE


def random_call(
    device: torch.device,
    *,
    batch: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    q_length: int = 33,
    kv_length: int = 33,
    width: int = 16,
    v_width: int | None = None,
    sinks: str | None = "head",
    bias: bool = False,
    softcap: float | None = None,
    dtype: torch.dtype = torch.float32,
    **visibility: Any,
) -> AttentionCall:
    """A call with sinks around +2, tokens outside heads as projections leave them."""
    v_width = v_width or width

    def rows(length: int, number: int, size: int) -> Tensor:
        return torch.randn(batch, length, number, size, device=device, dtype=dtype).transpose(1, 2)

    sink = None
    if sinks == "head":
        sink = torch.randn(heads, device=device) + 2
    elif sinks == "token":
        sink = torch.randn(batch, heads, q_length, 1, device=device) + 2
    return AttentionCall(
        rows(q_length, heads, width),
        rows(kv_length, kv_heads, width),
        rows(kv_length, kv_heads, v_width),
        width**-0.5,
        Visibility(batch, q_length, kv_length, **visibility),
        sinks=sink,
        bias=torch.randn(1, heads, q_length, kv_length, device=device) if bias else None,
        softcap=softcap,
    )


def in_double(call: AttentionCall) -> AttentionCall:
    """The same call in fp64, with leaves of its own."""

    def leaf(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.detach().double().requires_grad_(tensor.requires_grad)

    query, key, value = leaf(call.query), leaf(call.key), leaf(call.value)
    assert query is not None
    assert key is not None
    assert value is not None
    return AttentionCall(
        query, key, value, call.scale, call.visibility, leaf(call.sinks), leaf(call.bias), call.softcap
    )  # fmt: skip


def expected(call: AttentionCall) -> Tensor:
    """The reference's output in fp64."""
    return REFERENCE.attend(in_double(call)).output


def gradients(output: Tensor, call: AttentionCall, seed: Tensor) -> list[Tensor]:
    """Gradients of query, key, value and sinks."""
    wanted = [t for t in (call.query, call.key, call.value, call.sinks) if t is not None]
    return list(torch.autograd.grad(output, wanted, seed))


def relative(found: Tensor, truth: Tensor) -> float:
    """The relative L2 distance; infinite where something is not finite."""
    if not bool(torch.isfinite(found).all()):
        return float("inf")
    return float((found.double() - truth.double()).norm() / truth.double().norm().clamp_min(1e-30))
