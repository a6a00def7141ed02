"""torch's flex_attention with its log-sum-exp; the sink joins outside of it, in fp32."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..errors import BackendError
from .call import Attended, AttentionCall, Visibility
from .capability import Capability, Feature

_Mod = Callable[..., Tensor]


class Flex:
    """Compiled by torch for each kind of mask and score; on the CPU torch's flex_attention returns no log-sum-exp."""

    name = "flex"
    capability = Capability(
        devices=frozenset({"cuda"}),
        dtypes=frozenset({torch.float16, torch.bfloat16, torch.float32}),
        features=~(Feature.DROPOUT | Feature.WEIGHTS | Feature.BIAS_GRADIENT),
        head_dims=lambda qk, v: None if min(qk, v) >= 16 else f"head dims {qk}/{v} (at least 16)",
        deterministic=False,
    )

    def unavailable(self) -> str | None:
        """None, or what is missing: a CUDA device, or a torch whose flex_attention returns the log-sum-exp."""
        if not torch.cuda.is_available():
            return "no CUDA device, and flex_attention returns no log-sum-exp on the CPU"
        try:
            from torch.nn.attention.flex_attention import AuxRequest  # noqa: F401
        except ImportError:
            return f"flex_attention of torch {torch.__version__} has no return_aux"
        return None

    def attend(self, call: AttentionCall) -> Attended:
        """Compute one call.

        Raises:
            BackendError: the tensors are not on a CUDA device.
        """
        if call.query.device.type != "cuda":
            raise BackendError(
                f"backend 'flex' has no log-sum-exp on {call.query.device.type}, so it cannot join a sink"
            )
        from torch.nn.attention.flex_attention import AuxRequest, create_block_mask

        v, block_mask = call.visibility, None
        if not v.is_full:
            batch = v.batch_size if v.padding is not None or v.documents is not None or v.dense is not None else 1
            batch = v.batch_size if v.chunk_start is not None else batch
            heads = call.query.shape[1] if v.dense is not None and v.dense.dim() == 4 and v.dense.shape[1] > 1 else 1
            device = call.query.device
            block_mask = create_block_mask(mask_mod(v), batch, heads, v.q_length, v.kv_length, device=device)
        out, aux = _kernel()(
            call.query,
            call.key,
            call.value,
            score_mod=score_mod(call),
            block_mask=block_mask,
            scale=call.scale,
            enable_gqa=call.query.shape[1] != call.key.shape[1],
            return_aux=AuxRequest(lse=True),
        )
        return Attended(join(out, aux.lse, call.sinks).transpose(1, 2).contiguous())


@functools.cache
def _kernel() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def join(out: Tensor, lse: Tensor, sinks: Tensor | None) -> Tensor:
    """`out` times the keys' share of the softmax, sigmoid(lse - sink); zero where lse is -inf: no key was seen."""
    if sinks is None:
        return out
    sink = sinks[None, :, None] if sinks.dim() == 1 else sinks[..., 0]
    gap = torch.where(lse == float("-inf"), lse, lse - sink.to(lse.dtype))
    return (out * torch.sigmoid(gap)[..., None]).to(out.dtype)


def mask_mod(v: Visibility) -> _Mod:
    """The visibility as a function of batch, head, query and key index."""

    def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        q, k = i + v.q_offset, j + v.kv_offset
        seen = j >= 0
        if v.left is not None:
            seen = seen & (q - k <= v.left)
        if v.right is not None:
            seen = seen & (k - q <= v.right)
        if v.chunk_size is not None:
            start = 0 if v.chunk_start is None else v.chunk_start[b]
            seen = seen & _same_chunk(q - start, k - start, v.chunk_size)
        if v.documents is not None:
            queries = v.documents if v.query_documents is None else v.query_documents
            seen = seen & (queries[b, i] == v.documents[b, j])
        if v.padding is not None:
            seen = seen & v.padding[b, j]
        if v.dense is not None:
            seen = seen & _at(v.dense, b, h, i, j)
        return seen

    return visible


def _same_chunk(q: Tensor, k: Tensor, size: int) -> Tensor:
    return torch.div(q, size, rounding_mode="floor") == torch.div(k, size, rounding_mode="floor")


def score_mod(call: AttentionCall) -> _Mod | None:
    """Softcap, then bias, as a function of a scaled score and its indices; None when there is neither."""
    cap, bias = call.softcap, call.bias
    if cap is None and bias is None:
        return None

    def change(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        score = score if cap is None else cap * torch.tanh(score / cap)
        return score if bias is None else score + _at(bias, b, h, i, j)

    return change


def _at(tensor: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """The entry of a tensor that broadcasts to 4 dimensions."""
    tensor = tensor.reshape((1,) * (4 - tensor.dim()) + tuple(tensor.shape))
    index = [x if n > 1 else 0 * x for x, n in zip((b, h, i, j), tensor.shape, strict=True)]
    return tensor[index[0], index[1], index[2], index[3]]


BACKEND = Flex()
