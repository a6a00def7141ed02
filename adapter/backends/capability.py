"""What a layer needs, what a backend has, and the reasons why the two do not fit."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

import torch

from .call import AttentionCall


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
        """Read the needs off a call."""
        q, v = call.query, call.value
        device = q.device.type
        return cls(
            device=device,
            compute_capability=torch.cuda.get_device_capability(q.device) if device == "cuda" else None,
            dtype=q.dtype,
            num_heads=q.shape[1],
            num_kv_heads=call.key.shape[1],
            qk_head_dim=q.shape[3],
            v_head_dim=v.shape[3],
            decode=q.shape[2] == 1,
            features=_features(call),
        )


def _features(call: AttentionCall) -> Feature:
    visibility, f = call.visibility, Feature.NONE
    if call.sinks is not None:
        f |= Feature.SINK_PER_HEAD if call.sinks.dim() == 1 else Feature.SINK_PER_TOKEN
    if visibility.right is not None:
        f |= Feature.CAUSAL
    if visibility.left is not None:
        f |= Feature.WINDOW
    if visibility.chunk_size is not None:
        f |= Feature.CHUNK
    if visibility.documents is not None:
        f |= Feature.DOCUMENTS
    if visibility.padding is not None:
        f |= Feature.PADDING
    if visibility.dense is not None:
        f |= Feature.DENSE_MASK
    if call.bias is not None:
        f |= Feature.BIAS
    if call.softcap is not None:
        f |= Feature.SOFTCAP
    if call.dropout:
        f |= Feature.DROPOUT
    if call.need_weights:
        f |= Feature.WEIGHTS
    if isinstance(visibility.q_offset, torch.Tensor):
        f |= Feature.DEVICE_OFFSET
    if torch.is_grad_enabled():
        if any(t.requires_grad for t in (call.query, call.key, call.value)):
            f |= Feature.BACKWARD
        if call.bias is not None and call.bias.requires_grad:
            f |= Feature.BACKWARD | Feature.BIAS_GRADIENT
        if call.sinks is not None and call.sinks.requires_grad:
            f |= Feature.BACKWARD | Feature.SINK_GRADIENT
    return f


@dataclass(frozen=True)
class Capability:
    """What a backend can do. `head_dims(qk, v)` and `group_size(n)` return None when they can, else the reason."""

    devices: frozenset[str]
    dtypes: frozenset[torch.dtype]
    features: Feature
    min_compute_capability: tuple[int, int] | None = None
    head_dims: Callable[[int, int], str | None] = lambda qk, v: None
    group_size: Callable[[int], str | None] = lambda group: None
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
        return reasons
