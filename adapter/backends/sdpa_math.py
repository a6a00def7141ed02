"""Attention with a sink from any op that returns its log-sum-exp: the correction forward, and its exact gradient.

With lse_s = logaddexp(lse, sink), the output of the op times sigmoid(lse - sink) is softmax over keys and sink, and the
weights are exp(logits - lse_s). The backward of the op, handed this output and lse_s, therefore gives the exact
gradients of query, key and value; that of the sink is -sum(exp(sink - lse_s) * rowsum(grad * output)).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from . import blocks, torch_ops
from .blocks import Block
from .call import AttentionCall

_SLICE = 256


@dataclass(frozen=True)
class _Prepared:
    """One block as the op takes it; `seeing` is False for the queries that see no key, whose mask was lifted to stay
    finite. [batch or 1, num_heads or 1, rows], None when all see one."""

    piece: torch_ops.Piece
    block: Block
    num_heads: int
    seeing: Tensor | None

    def pack(self, tensor: Tensor) -> Tensor:
        """Heads to rows, where the block is packed."""
        kv_heads = self.piece.query.shape[1]
        return tensor if kv_heads == self.num_heads else blocks.pack(tensor, kv_heads)

    def unpack(self, tensor: Tensor) -> Tensor:
        """Rows back to heads."""
        return tensor if tensor.shape[1] == self.num_heads else blocks.unpack(tensor, self.num_heads)


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which the log-sum-exp and the correction are kept."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def forward(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """Output [batch, q_length, num_heads, v_head_dim] and lse_s [batch, num_heads, q_length]; records no gradient."""
    batch, num_heads, q_length, _ = call.query.shape
    v_head_dim = call.value.shape[3]
    output = call.query.new_zeros(batch, q_length, num_heads, v_head_dim)
    lse_s = call.query.new_zeros(batch, num_heads, q_length, dtype=lse_dtype(call.query.dtype))
    for p in _prepared(call):
        rows = slice(p.block.q_start, p.block.q_stop)
        out, lse = (p.unpack(t) for t in torch_ops.forward(p.piece))
        share, lse_s[:, :, rows] = _join(lse, _sink(call, rows, lse.dtype))
        share = share if p.seeing is None else share * p.seeing
        out, share = out[..., :v_head_dim].transpose(1, 2), share.transpose(1, 2)[..., None]
        _multiply(out, share, output[:, rows])
    return output, lse_s


def partial(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp over the keys of this call alone, without a sink, to be merged with those over others.

    Returns:
        Output [batch, q_length, num_heads, v_head_dim] in the query's dtype, and the log-sum-exp
        [batch, num_heads, q_length]; 0 and -inf for a query that sees none of the keys. Records no gradient.
    """
    batch, num_heads, q_length, _ = call.query.shape
    v_head_dim = call.value.shape[3]
    output = call.query.new_zeros(batch, q_length, num_heads, v_head_dim)
    lse = call.query.new_full((batch, num_heads, q_length), float("-inf"), dtype=lse_dtype(call.query.dtype))
    for p in _prepared(call):
        rows = slice(p.block.q_start, p.block.q_stop)
        out, found = (p.unpack(t) for t in torch_ops.forward(p.piece))
        if p.seeing is not None:
            out, found = out * p.seeing[..., None].to(out.dtype), found.masked_fill(~p.seeing, float("-inf"))
        output[:, rows], lse[:, :, rows] = out[..., :v_head_dim].transpose(1, 2), found
    return output, lse


def backward(call: AttentionCall, grad: Tensor, output: Tensor, lse_s: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key, value and sinks (an empty tensor without sinks), in their dtypes."""
    wide = lse_dtype(call.query.dtype)
    dq = torch.zeros_like(call.query)
    dk, dv = torch.zeros_like(call.key, dtype=wide), torch.zeros_like(call.value, dtype=wide)
    for p in _prepared(call):
        rows, columns = slice(p.block.q_start, p.block.q_stop), slice(p.block.kv_start, p.block.kv_stop)
        d_out = grad[:, rows].transpose(1, 2)
        d_out = d_out if p.seeing is None else d_out * p.seeing[..., None].to(d_out.dtype)
        pad = p.piece.value.shape[3] - d_out.shape[3]
        d_out, out = (p.pack(F.pad(t, (0, pad)).contiguous()) for t in (d_out, output[:, rows].transpose(1, 2)))
        # an infinite sum makes every weight zero; a finite one may be far below logits whose mask was lifted
        lse = lse_s[:, :, rows] if p.seeing is None else lse_s[:, :, rows].masked_fill(~p.seeing, float("inf"))
        dq_b, dk_b, dv_b = torch_ops.backward(p.piece, d_out, out, p.pack(lse).contiguous())
        dq[:, :, rows] = p.unpack(dq_b)[..., : dq.shape[3]]
        dk[:, :, columns] += dk_b[..., : dk.shape[3]]
        dv[:, :, columns] += dv_b[..., : dv.shape[3]]
    return dq, dk.to(call.key.dtype), dv.to(call.value.dtype), _sink_gradient(call, grad, output, lse_s)


def _multiply(out: Tensor, share: Tensor, into: Tensor) -> None:
    """By slices of queries: the product of half precision and fp32 makes fp32 copies of all that it is given."""
    for start in range(0, out.shape[1], _SLICE):
        rows = slice(start, start + _SLICE)
        torch.mul(out[:, rows], share[:, rows], out=into[:, rows])


def _join(lse: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor]:
    """The keys' share of the softmax, and the log-sum-exp with the sink."""
    if sink is None:
        return torch.ones_like(lse), lse
    return torch.sigmoid(lse - sink), torch.logaddexp(lse, sink)


def _sink(call: AttentionCall, rows: slice, dtype: torch.dtype) -> Tensor | None:
    if call.sinks is None:
        return None
    if call.sinks.dim() == 1:
        return call.sinks.to(dtype)[None, :, None]
    return call.sinks[:, :, rows, 0].to(dtype)


def _sink_gradient(call: AttentionCall, grad: Tensor, output: Tensor, lse_s: Tensor) -> Tensor:
    sink = _sink(call, slice(None), lse_s.dtype)
    if call.sinks is None or sink is None:
        return lse_s.new_empty(0)
    delta = (grad.to(lse_s.dtype) * output).sum(dim=3).transpose(1, 2)
    # a query that sees no key has delta 0, but an lse_s of 0 that says nothing: keep its exponential finite
    d_sink = -torch.exp((sink - lse_s).clamp(max=0)) * delta
    d_sink = d_sink.sum(dim=(0, 2)) if call.sinks.dim() == 1 else d_sink[..., None]
    return d_sink.to(call.sinks.dtype)


def _prepared(call: AttentionCall) -> Iterator[_Prepared]:
    visibility = blocks.simplify(call.visibility)
    call = call if visibility is call.visibility else replace(call, visibility=visibility)
    if blocks.is_plain_causal(call):
        length = call.query.shape[2]
        part = call.narrow(0, length, 0, length)
        piece = _piece(part, part.query, None, causal=True)
        yield _Prepared(piece, Block(0, length, 0, length), call.query.shape[1], None)
        return
    for block in blocks.blocks(call):
        part = call.narrow(block.q_start, block.q_stop, block.kv_start, block.kv_stop)
        prepared = _prepare(part, block)
        if prepared is not None:
            yield prepared


def _prepare(part: AttentionCall, block: Block) -> _Prepared | None:
    visible = blocks.simplify(part.visibility).to_bool(part.query.device)
    bias = part.bias
    if visible is not None and visible.device.type == "cpu":
        start, stop = blocks.seen_columns(visible)
        if stop == start:
            return None
        part, visible = part.narrow(0, part.query.shape[2], start, stop), visible[..., start:stop]
        bias, visible = part.bias, None if bool(visible.all()) else visible
        block = replace(block, kv_start=block.kv_start + start, kv_stop=block.kv_start + stop)
    mask, seeing = blocks.additive(visible, bias, part.query.dtype), None
    if mask is not None:
        mask = blocks.spread(mask, part.query.shape[2], part.key.shape[2])
        seeing = (mask != float("-inf")).any(dim=3)
        mask = mask.masked_fill(~seeing[..., None], 0)
    num_heads, num_kv_heads = part.query.shape[1], part.key.shape[1]
    query = part.query
    if blocks.is_packed(part):
        query = blocks.pack(query, num_kv_heads)
        mask = None if mask is None else blocks.pack_mask(mask, num_heads, num_kv_heads)
    return _Prepared(_piece(part, query, mask, causal=False), block, num_heads, seeing)


def _piece(part: AttentionCall, query: Tensor, mask: Tensor | None, *, causal: bool) -> torch_ops.Piece:
    """Tensors with one head dim, zero-padded, which changes neither the logits nor the columns that are kept."""
    width = max(part.query.shape[3], part.value.shape[3])
    width += 0 if part.query.device.type == "cpu" else -width % 8
    query, key, value = (_padded(t, width) for t in (query, part.key, part.value))
    return torch_ops.Piece(query, key, value, mask, causal, part.scale)


def _padded(tensor: Tensor, width: int) -> Tensor:
    tensor = F.pad(tensor, (0, width - tensor.shape[3])) if tensor.shape[3] < width else tensor
    return tensor if tensor.stride(3) == 1 else tensor.contiguous()
