"""What a forward may be given while its sequence is spread over ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from transformers.loss.loss_utils import ForCausalLMLoss

from ..errors import ParallelError

_CACHES = ("past_key_values", "cache")
_LENGTHS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


def shifts_labels(model: nn.Module) -> bool:
    """Whether the model's own loss compares each token with the label after it, and takes labels shifted before."""
    return getattr(model, "loss_function", None) is ForCausalLMLoss


def check_inputs(model: nn.Module, inputs: Mapping[str, Any]) -> None:
    """Raise ParallelError for inputs whose meaning needs the whole sequence; asks no other rank.

    Args:
        model: the model that is called.
        inputs: its inputs by name.
    """
    for check in (_check_caches, _check_tokens, _check_router_loss, _check_labels):
        found = check(model, {name: value for name, value in inputs.items() if value is not None})
        if found is not None:
            what, why, fix = found
            raise ParallelError(what, where=type(model).__name__, why=why, fix=fix)


_Refusal = tuple[str, str, str]
"""What, why and fix."""


def _check_caches(model: nn.Module, given: Mapping[str, Any]) -> _Refusal | None:
    lengths = sorted(given.keys() & {*_LENGTHS})
    if lengths:
        return (
            f"the call has {', '.join(lengths)}",
            "lengths of packed documents count from the first token of the whole sequence",
            "pass position_ids that start again with each document",
        )
    if given.keys() & {*_CACHES} or given.get("use_cache"):
        return (
            "a cache of keys is asked for",
            "it would hold this rank's slice, and decoding would see nothing else",
            "pass use_cache=False; generate after the context is closed",
        )
    return None


def _check_tokens(model: nn.Module, given: Mapping[str, Any]) -> _Refusal | None:
    tokens = given.get("input_ids", given.get("inputs_embeds"))
    if not isinstance(tokens, Tensor) or tokens.dim() < 2:
        return "neither input_ids nor inputs_embeds are given", "the sequence has no slice here", "pass one of the two"
    for name in ("attention_mask", "position_ids"):
        value = given.get(name)
        if value is not None and (not isinstance(value, Tensor) or value.shape[1:] != (tokens.shape[1],)):
            shape = f" of the shape {list(value.shape)}" if isinstance(value, Tensor) else ""
            return (
                f"{name} is a {type(value).__name__}{shape}, for {tokens.shape[1]} tokens of this rank",
                "only what belongs to single tokens can be put together from the slices",
                f"pass {name} as [batch, length], cut like the tokens",
            )
    return None


def _check_router_loss(model: nn.Module, given: Mapping[str, Any]) -> _Refusal | None:
    if given.get("output_router_logits", getattr(getattr(model, "config", None), "output_router_logits", False)):
        return (
            "the router logits are asked for",
            "their loss is a product of means over the whole sequence, which no sum over ranks gives",
            "pass output_router_logits=False",
        )
    return None


def _check_labels(model: nn.Module, given: Mapping[str, Any]) -> _Refusal | None:
    if "labels" not in given:
        return None
    if not shifts_labels(model):
        return (
            "the model's own loss is asked for, and it is none of a causal language model",
            "it may be a mean over this rank's tokens, which does not sum to that of the whole sequence",
            "leave labels out, and compute the loss from the logits",
        )
    missing = [name for name in ("shift_labels", "num_items_in_batch") if name not in given]
    if missing:
        return (
            f"labels are given without {' and '.join(missing)}",
            "the label after a slice's last token lies on the next rank, and a mean over a slice is not that over all",
            "cut the batch with context.split(batch)",
        )
    return None
