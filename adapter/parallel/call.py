"""An interface call of a model whose sequence is spread over ranks, in the backends' terms."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from ..attention import Attention
from ..backends.call import AttentionCall
from ..errors import ParallelError
from ..guard import where
from ..masks import LazyMask
from ..translate import build_call
from .sequence import MASK_WHY, RUN_WHOLE, mask_obstacle

_BY_LENGTH = ("position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "is_causal", "sliding_window")
"""Keywords that the mask says for the whole sequence; here they would speak of a part."""

_KEYS_WHY = "keys that are made from many tokens would be made from this rank's alone"


def whole_call(
    attn: Attention, qkv: tuple[Tensor, Tensor, Tensor], mask: Any, sink: Tensor | None, kwargs: dict[str, Any]
) -> AttentionCall:
    """The call with this rank's tensors and the visibility that its mask carries.

    Args:
        attn: the layer.
        qkv: query, key and value [batch, heads, length, head_dim].
        mask, sink, kwargs: as the guard has let them pass.

    Raises:
        ParallelError: the call has a part whose meaning would change with the length of the sequence.
    """
    module = attn.owner
    found = _obstacle(qkv, mask, sink, kwargs)
    if found is not None:
        raise ParallelError(found[0], where=where(module, attn), why=found[1], fix=RUN_WHOLE)
    rest = {name: value for name, value in kwargs.items() if name not in _BY_LENGTH}
    call = build_call(module, attn, qkv, None, sink, rest)
    for unfit, what in ((call.dropout, "dropout on the attention weights"), (call.need_weights, "attention weights")):
        if unfit:
            raise ParallelError(
                what,
                where=where(module, attn),
                why="no rank has the weights of whole rows",
                fix="set attention_dropout to 0 and output_attentions to False",
            )
    return replace(call, visibility=mask.visibility)


def _obstacle(
    qkv: tuple[Tensor, Tensor, Tensor], mask: Any, sink: Tensor | None, kwargs: dict[str, Any]
) -> tuple[str, str] | None:
    """What in a call has no meaning on a part of the sequence, and why that matters; None for nothing."""
    q_length, kv_length = qkv[0].shape[2], qkv[1].shape[2]
    if q_length != kv_length:
        return f"{kv_length} keys for {q_length} tokens: the layer keeps or makes keys of its own", _KEYS_WHY
    for name in ("indices", "position_bias"):
        if kwargs.get(name) is not None:
            return f"the model passes {name}=, which counts keys from the first one it holds", MASK_WHY
    if sink is not None and sink.dim() == 4:
        return "a sink that is computed for each token", "neither method moves such sinks with their queries"
    if mask is None:
        return "the layer gets no mask", "a window or padding of the whole sequence could not be told from its part"
    if not isinstance(mask, LazyMask) or getattr(mask, "written", False):
        return "a mask that the model has computed itself", MASK_WHY
    obstacle = mask_obstacle(mask.visibility)
    return None if obstacle is None else (obstacle, MASK_WHY)
