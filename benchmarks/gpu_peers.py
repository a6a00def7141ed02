"""The attentions that `gpu_attention.py` times beside this project's: each takes tokens-outside-heads tensors and
sinks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from adapter.backends.call import AttentionCall, Visibility

Attention = Callable[[Tensor, Tensor, Tensor, Tensor, int | None, float], Tensor]
"""(query, key, value, sinks, window, scale) -> output; [batch, heads, tokens, width] in, [batch, tokens, heads,
width] out."""


@dataclass(frozen=True)
class Peer:
    """One implementation: `has_sink` is False for a ceiling that computes less."""

    name: str
    attend: Attention
    has_sink: bool = True
    trains: bool = True
    windows: bool = True
    decodes: bool = False


def _call(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, window: int | None, scale: float) -> AttentionCall:
    q_length, kv_length = query.shape[2], key.shape[2]
    left = None if window is None else window - 1
    visibility = Visibility(query.shape[0], q_length, kv_length, q_offset=kv_length - q_length, left=left, right=0)
    return AttentionCall(query, key, value, scale, visibility, sinks)


def _ours() -> Peer:
    from adapter.backends.triton import BACKEND

    return Peer("sinkhold triton", lambda *a: BACKEND.attend(_call(*a)).output, decodes=True)


def _flash_pair() -> Peer:
    from adapter.backends.sdpa import BACKEND

    return Peer("torch flash, exact pair", lambda *a: BACKEND.attend(_call(*a)).output)


def _sdpa_without_sink() -> Peer:
    def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, window: int | None, scale: float) -> Tensor:
        causal = q.shape[2] > 1
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=True).transpose(1, 2)

    return Peer("torch SDPA, no sink", attend, has_sink=False, windows=False, decodes=True)


def _flex() -> Peer:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    compiled = torch.compile(flex_attention, dynamic=False)

    @functools.cache
    def mask(length: int, window: int | None) -> object:
        def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (q >= k) if window is None else (q >= k) & (q - k < window)

        return create_block_mask(visible, None, None, length, length, device="cuda")

    def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, window: int | None, scale: float) -> Tensor:
        out, lse = compiled(
            q, k, v, block_mask=mask(q.shape[2], window), scale=scale, enable_gqa=True, return_lse=True
        )  # fmt: skip
        share = torch.sigmoid(lse - sinks[:, None])
        return (out * share[..., None].to(out.dtype)).transpose(1, 2)

    return Peer("torch flex + lse", attend)


def _fla() -> Peer:
    from fla.ops.attn.parallel import parallel_attn

    def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, window: int | None, scale: float) -> Tensor:
        rows = (q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        out = parallel_attn(*rows, sink_bias=sinks, window_size=window, scale=scale)
        return out[0] if isinstance(out, tuple) else out

    return Peer("fla-core", attend)


def _flash_attention_4() -> Peer:
    from flash_attn.cute import flash_attn_func

    def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, window: int | None, scale: float) -> Tensor:
        limits = (None, None) if window is None else (window - 1, 0)
        out = flash_attn_func(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), softmax_scale=scale, causal=window is None,
            window_size=limits, learnable_sink=sinks.to(q.dtype),
        )  # fmt: skip
        return out[0] if isinstance(out, tuple) else out

    return Peer("FlashAttention 4", attend, decodes=True)


def _flash_attention_3() -> Peer:
    from flash_attn_interface import flash_attn_func

    def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, window: int | None, scale: float) -> Tensor:
        limits = (-1, -1) if window is None else (window - 1, 0)
        out = flash_attn_func(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), softmax_scale=scale, causal=True,
            window_size=limits, sinks=sinks.to(torch.bfloat16),
        )  # fmt: skip
        return out[0] if isinstance(out, tuple) else out

    return Peer("FlashAttention 3", attend, trains=False, decodes=True)


_MAKERS = {
    "sinkhold": _ours,
    "flash_pair": _flash_pair,
    "sdpa": _sdpa_without_sink,
    "flex": _flex,
    "fla": _fla,
    "flash_attention_4": _flash_attention_4,
    "flash_attention_3": _flash_attention_3,
}
NAMES = tuple(_MAKERS)
"""All peers, ours first."""


def make(name: str) -> Peer:
    """The peer called `name`; ImportError where it is not installed."""
    return _MAKERS[name]()
