"""What a layer needs, what a backend has, and the reasons why the two do not fit."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .call import AttentionCall, Visibility


class Feature(enum.Flag):
    """One thing that a call may ask of a backend."""

    NONE = 0
    SINK_PER_HEAD = enum.auto()
    SINK_PER_TOKEN = enum.auto()
    CAUSAL = enum.auto()
    WINDOW = enum.auto()
    CHUNK = enum.auto()
    DOCUMENTS = enum.auto()
    PADDING = enum.auto()
    DENSE_MASK = enum.auto()
    BIAS = enum.auto()
    SOFTCAP = enum.auto()
    DROPOUT = enum.auto()
    WEIGHTS = enum.auto()
    DEVICE_OFFSET = enum.auto()
    """the position of the first query is a tensor on the device"""
    BACKWARD = enum.auto()
    SINK_GRADIENT = enum.auto()
    BIAS_GRADIENT = enum.auto()

    def names(self) -> list[str]:
        """The single features that are set, as words."""
        return [f.name.lower().replace("_", " ") for f in Feature if f in self and f.value and f.name]


_CAUSAL = Feature.CAUSAL.value
_WINDOW = Feature.WINDOW.value
_CHUNK = Feature.CHUNK.value
_DOCUMENTS = Feature.DOCUMENTS.value
_PADDING = Feature.PADDING.value
_DENSE_MASK = Feature.DENSE_MASK.value
_DEVICE_OFFSET = Feature.DEVICE_OFFSET.value
_SINK_PER_HEAD = Feature.SINK_PER_HEAD.value
_SINK_PER_TOKEN = Feature.SINK_PER_TOKEN.value
_BIAS = Feature.BIAS.value
_SOFTCAP = Feature.SOFTCAP.value
_DROPOUT = Feature.DROPOUT.value
_WEIGHTS = Feature.WEIGHTS.value
_BACKWARD = Feature.BACKWARD.value
_BIAS_GRADIENT = Feature.BIAS_GRADIENT.value
_SINK_GRADIENT = Feature.SINK_GRADIENT.value


@dataclass(frozen=True)
class Needs:
    """What one call asks for; hashable, so that a selection is made once for each kind of call."""

    device: str
    compute_capability: tuple[int, int] | None
    dtype: torch.dtype
    num_heads: int
    num_kv_heads: int
    qk_head_dim: int
    v_head_dim: int
    decode: bool
    features: Feature

    @classmethod
    def of(cls, call: AttentionCall) -> Needs:
        """Read the needs off a call; equal calls get the same object."""
        return cls.from_key(*key_of(call))

    @classmethod
    def from_key(
        cls,
        device: torch.device,
        dtype: torch.dtype,
        num_heads: int,
        num_kv_heads: int,
        qk_head_dim: int,
        v_head_dim: int,
        decode: bool,
        features: int,
    ) -> Needs:
        """What `key_of` read off a call; equal keys give the same object."""
        sizes = (num_heads, num_kv_heads, qk_head_dim, v_head_dim, decode)
        key = (device, dtype, *sizes, features)
        needs = _known.get(key)
        if needs is None:
            capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
            needs = _known[key] = cls(device.type, capability, dtype, *sizes, Feature(features))
        return needs

    def __post_init__(self) -> None:
        # Integers only: a hash of strings would not survive pickling.
        parts = (self.num_heads, self.num_kv_heads, self.qk_head_dim, self.decode, self.features.value)
        object.__setattr__(self, "_hash", hash(parts))

    def __hash__(self) -> int:
        kept: int = self.__dict__["_hash"]
        return kept


_known: dict[tuple[object, ...], Needs] = {}


def key_of(call: AttentionCall) -> tuple[Any, ...]:
    """What the needs of a call depend on, as plain values: the arguments of `Needs.from_key`."""
    query, key = call.query, call.key
    # A branch, so that a graph for any length knows whether it decodes.
    decode = True if query.shape[2] == 1 else False  # noqa: SIM210
    sizes = (query.shape[1], key.shape[1], query.shape[3], call.value.shape[3])
    return query.device, query.dtype, *sizes, decode, _features(call)


def _features(call: AttentionCall) -> int:
    """The bits of `Feature`: integers, since this runs on every call and arithmetic on flags is slow."""
    return _mask_features(call.visibility) | _logit_features(call) | _gradient_features(call)


def _mask_features(v: Visibility) -> int:
    bits = 0
    if v.right is not None:
        bits |= _CAUSAL
    if v.left is not None:
        bits |= _WINDOW
    if v.chunk_size is not None:
        bits |= _CHUNK
    if v.documents is not None:
        bits |= _DOCUMENTS
    if v.padding is not None:
        bits |= _PADDING
    if v.dense is not None:
        bits |= _DENSE_MASK
    if isinstance(v.q_offset, Tensor):
        bits |= _DEVICE_OFFSET
    return bits


def _logit_features(call: AttentionCall) -> int:
    bits = 0
    if call.sinks is not None:
        bits |= _SINK_PER_HEAD if call.sinks.dim() == 1 else _SINK_PER_TOKEN
    if call.bias is not None:
        bits |= _BIAS
    if call.softcap is not None:
        bits |= _SOFTCAP
    if call.dropout:
        bits |= _DROPOUT
    if call.need_weights:
        bits |= _WEIGHTS
    return bits


def _gradient_features(call: AttentionCall) -> int:
    if not torch.is_grad_enabled():
        return 0
    bits = 0
    if call.query.requires_grad or call.key.requires_grad or call.value.requires_grad:
        bits |= _BACKWARD
    if call.bias is not None and call.bias.requires_grad:
        bits |= _BACKWARD | _BIAS_GRADIENT
    if call.sinks is not None and call.sinks.requires_grad:
        bits |= _BACKWARD | _SINK_GRADIENT
    return bits


@dataclass(frozen=True)
class Capability:
    """What a backend can do. `head_dims(qk, v)` and `group_size(n)` return None when they can, else the reason."""

    devices: frozenset[str]
    dtypes: frozenset[torch.dtype]
    features: Feature
    min_compute_capability: tuple[int, int] | None = None
    head_dims: Callable[[int, int], str | None] = lambda qk, v: None
    group_size: Callable[[int], str | None] = lambda group: None
    combination: Callable[[Needs], str | None] = lambda needs: None
    """a reason that no single field shows, such as a dtype on one device only"""
    deterministic: bool = True
    graph_safe: bool = True

    def refusals(self, needs: Needs) -> list[str]:
        """Every reason why this backend cannot serve `needs`; empty when it can."""
        reasons = []
        if needs.device not in self.devices:
            reasons.append(f"device {needs.device} (has {', '.join(sorted(self.devices))})")
        if needs.dtype not in self.dtypes:
            reasons.append(f"dtype {str(needs.dtype).removeprefix('torch.')}")
        need_cc, has_cc = self.min_compute_capability, needs.compute_capability
        if need_cc is not None and has_cc is not None and has_cc < need_cc:
            reasons.append(f"compute capability {has_cc[0]}.{has_cc[1]} (needs {need_cc[0]}.{need_cc[1]})")
        missing = needs.features & ~self.features
        reasons.extend(f"no {name}" for name in missing.names())
        if needs.num_heads % needs.num_kv_heads:
            reasons.append(f"{needs.num_heads} query heads over {needs.num_kv_heads} kv heads")
        else:
            reasons.extend(r for r in [self.group_size(needs.num_heads // needs.num_kv_heads)] if r)
        reasons.extend(r for r in [self.head_dims(needs.qk_head_dim, needs.v_head_dim)] if r)
        reasons.extend(r for r in [self.combination(needs)] if r)
        return reasons
