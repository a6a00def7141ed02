"""The attention ops of torch that return their log-sum-exp, one calling convention for CPU and CUDA, no sink yet."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

_aten = torch.ops.aten


@dataclass(frozen=True)
class Piece:
    """Tensors of one call of an op.

    Args:
        query: [batch, num_heads, rows, head_dim].
        key: [batch, num_kv_heads, columns, head_dim].
        value: as key.
        mask: additive, of the query's dtype, 4-d and broadcastable to [batch, num_heads, rows, columns]; None for none.
        causal: row i sees the columns up to i. Not together with a mask.
        scale: factor of query @ key.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    causal: bool
    scale: float


def forward(p: Piece) -> tuple[Tensor, Tensor]:
    """Output [batch, num_heads, rows, head_dim] and log-sum-exp [batch, num_heads, rows] in fp32 (fp64 for fp64)."""
    if p.query.device.type == "cpu":
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
            p.query, p.key, p.value, 0.0, p.causal, attn_mask=p.mask, scale=p.scale
        )
        return out, lse
    if _flash_on_cuda(p):
        out, lse, *_ = _aten._scaled_dot_product_flash_attention(
            p.query, p.key, p.value, 0.0, p.causal, False, scale=p.scale
        )
        return out, lse
    key, value = _expanded(p)
    out, lse, *_ = _aten._scaled_dot_product_efficient_attention(
        p.query, key, value, _aligned(p), True, 0.0, p.causal, scale=p.scale
    )
    return out, lse[..., : p.query.shape[2]]


def backward(p: Piece, grad: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, for weights `exp(logits - lse)` and `out` their product with the value."""
    if p.query.device.type == "cpu":
        dq, dk, dv = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, p.query, p.key, p.value, out, lse, 0.0, p.causal, attn_mask=p.mask, scale=p.scale
        )
        return dq, dk, dv
    rows, columns = p.query.shape[2], p.key.shape[2]
    seed = torch.zeros(2, dtype=torch.uint64, device=p.query.device)
    if _flash_on_cuda(p):
        # No cumulative lengths: an empty tensor would mean a packed batch of no rows.
        dq, dk, dv = _aten._scaled_dot_product_flash_attention_backward(
            grad, p.query, p.key, p.value, out, lse, None, None, rows, columns, 0.0, p.causal, seed, seed, scale=p.scale
        )
        return dq, dk, dv
    key, value = _expanded(p)
    lse = F.pad(lse, (0, -rows % 32))
    bias = _aligned(p)
    zero, wanted = torch.zeros((), dtype=torch.int64, device=p.query.device), [True, True, True, False]
    dq, dk, dv, _ = _aten._scaled_dot_product_efficient_attention_backward(
        grad, p.query, key, value, bias, out, lse, zero, zero, 0.0, wanted, p.causal, scale=p.scale
    )
    return dq, _folded(dk, p), _folded(dv, p)


def _flash_on_cuda(p: Piece) -> bool:
    half = p.query.dtype in (torch.float16, torch.bfloat16)
    return half and p.mask is None and p.query.shape[3] <= 256 and p.query.shape[3] % 8 == 0


def _expanded(p: Piece) -> tuple[Tensor, Tensor]:
    group = p.query.shape[1] // p.key.shape[1]
    return p.key.repeat_interleave(group, dim=1), p.value.repeat_interleave(group, dim=1)


def _folded(grad: Tensor, p: Piece) -> Tensor:
    batch, num_kv_heads, columns, head_dim = p.key.shape
    return grad.reshape(batch, num_kv_heads, -1, columns, head_dim).sum(dim=2)


def _aligned(p: Piece) -> Tensor | None:
    """The mask as the efficient op wants it: expanded, each row starting at a multiple of 16 bytes."""
    if p.mask is None:
        return None
    shape = (p.query.shape[0], p.query.shape[1], p.query.shape[2], p.key.shape[2])
    columns = shape[3]
    return F.pad(p.mask.expand(*p.mask.shape[:3], columns), (0, -columns % 8))[..., :columns].expand(shape)
