"""Small attention calls, from a description: the inputs of the contract and of the proof."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .call import AttentionCall, Visibility
from .capability import Capability, Feature, Needs

SINKS = ("large", "none", "-inf", "-10", "0", "20", "1e4", "mixed")
_WINDOW, _CHUNK, _SOFTCAP = 5, 8, 4.0


@dataclass(frozen=True)
class Case:
    """One attention call: geometry, what it asks for, and its sinks.

    Args:
        features: masks, sink kind and gradients to exercise; dropout is left out, as it has no expected value.
        q_offset: position of the first query; keys beyond the last query are the unwritten slots of a static cache.
        window: tokens that a query sees, itself included, with Feature.WINDOW.
        sinks: one of SINKS.
        poisoned: keys and values beyond the last query hold NaN; needs Feature.CAUSAL.
    """

    features: Feature
    q_length: int
    kv_length: int
    q_offset: int = 0
    num_heads: int = 4
    num_kv_heads: int = 2
    qk_head_dim: int = 64
    v_head_dim: int = 64
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    batch_size: int = 2
    window: int = _WINDOW
    sinks: str = "large"
    poisoned: bool = False
    seed: int = 0

    def __str__(self) -> str:
        heads = f"{self.num_heads}/{self.num_kv_heads} heads of {self.qk_head_dim}/{self.v_head_dim}"
        where = f"q {self.q_length} at {self.q_offset} of kv {self.kv_length}"
        words = [*self.features.names(), f"sinks {self.sinks}", *(["poisoned"] if self.poisoned else [])]
        return f"{self.device} {str(self.dtype).removeprefix('torch.')}, {heads}, {where}, {', '.join(words)}"

    @property
    def differentiates(self) -> bool:
        """Whether gradients are compared."""
        return Feature.BACKWARD in self.features


def build(case: Case, dtype: torch.dtype | None = None) -> AttentionCall:
    """The call of a case: values rounded to the case's dtype, then held in `dtype` (the case's own by default)."""
    make = _Maker(case, case.dtype if dtype is None else dtype)
    f, kv = case.features, (case.batch_size, case.num_kv_heads, case.kv_length)
    query = make.normal(case.batch_size, case.num_heads, case.q_length, case.qk_head_dim)
    key, value = make.normal(*kv, case.qk_head_dim), make.normal(*kv, case.v_head_dim)
    if case.poisoned:
        last = case.q_offset + case.q_length
        key[:, :, last:], value[:, :, last:] = float("nan"), float("nan")
    bias = make.normal(1, case.num_heads, case.q_length, case.kv_length) if Feature.BIAS in f else None
    sinks = _sinks(case, make)
    if case.differentiates:
        for t in (query, key, value):
            t.requires_grad_()
    if sinks is not None:
        sinks.requires_grad_(Feature.SINK_GRADIENT in f)
    if bias is not None:
        bias.requires_grad_(Feature.BIAS_GRADIENT in f)
    return AttentionCall(
        query=query,
        key=key,
        value=value,
        scale=case.qk_head_dim**-0.5,
        visibility=_visibility(case, make),
        sinks=sinks,
        bias=bias,
        softcap=_SOFTCAP if Feature.SOFTCAP in f else None,
        need_weights=Feature.WEIGHTS in f,
    )


class _Maker:
    """Random tensors that are the same on every device and in every dtype, from a generator of their own."""

    def __init__(self, case: Case, dtype: torch.dtype) -> None:
        self.generator = torch.Generator(device="cpu").manual_seed(case.seed)
        self.case, self.dtype = case, dtype

    def place(self, tensor: Tensor) -> Tensor:
        """Rounded to the case's dtype, held in the wanted one, on the case's device."""
        return tensor.to(self.case.dtype).to(device=self.case.device, dtype=self.dtype)

    def normal(self, *shape: int) -> Tensor:
        """Standard normal."""
        return self.place(torch.randn(shape, generator=self.generator, dtype=torch.float64, device="cpu"))

    def uniform(self, *shape: int) -> Tensor:
        """In [0, 1), fp64 on the CPU."""
        return torch.rand(shape, generator=self.generator, dtype=torch.float64, device="cpu")


def _sinks(case: Case, make: _Maker) -> Tensor | None:
    kinds = Feature.SINK_PER_HEAD | Feature.SINK_PER_TOKEN
    if case.sinks == "none" or not case.features & kinds:
        return None
    shape: tuple[int, ...] = (case.num_heads,)
    if Feature.SINK_PER_TOKEN in case.features:
        shape = (case.batch_size, case.num_heads, case.q_length, 1)
    sinks = 2 + 2 * make.uniform(*shape)
    if case.sinks == "mixed":
        levels = torch.tensor([float("-inf"), -10.0, 0.0, 2.0, 20.0, 1e4], dtype=torch.float64, device="cpu")
        levels = levels[torch.arange(case.num_heads, device="cpu") % 6]
        sinks = (levels if sinks.dim() == 1 else levels[None, :, None, None]).expand(shape).clone()
    elif case.sinks != "large":
        sinks = torch.full(shape, float(case.sinks), dtype=torch.float64, device="cpu")
    return make.place(sinks)


def _visibility(case: Case, make: _Maker) -> Visibility:
    f, batch, q_length, kv_length = case.features, case.batch_size, case.q_length, case.kv_length
    v = Visibility(batch, q_length, kv_length, q_offset=case.q_offset)
    if Feature.DEVICE_OFFSET in f:
        v = v.with_(q_offset=torch.tensor(case.q_offset, device=case.device))
    if Feature.CAUSAL in f:
        v = v.with_(right=0)
    if Feature.WINDOW in f:
        v = v.with_(left=case.window - 1)
    if Feature.CHUNK in f:
        v = v.with_(chunk_size=_CHUNK, chunk_start=torch.arange(batch, device=case.device) if batch > 1 else None)
    if Feature.DOCUMENTS in f:
        documents = (3 * make.uniform(batch, kv_length)).long().sort(dim=1).values
        v = v.with_(documents=documents.to(case.device))
    if Feature.PADDING in f:
        v = v.with_(padding=_padding(case))
    if Feature.DENSE_MASK in f:
        v = v.with_(dense=(make.uniform(batch, 1, q_length, kv_length) < 0.7).to(case.device))
    return v


def _padding(case: Case) -> Tensor:
    """Left padding that grows with the row; the first row has none."""
    start = torch.arange(case.batch_size, device=case.device)[:, None] * max(1, case.kv_length // 4)
    return torch.arange(case.kv_length, device=case.device)[None] >= start


_KINDS = (
    Feature.NONE,
    Feature.CAUSAL,
    Feature.CAUSAL | Feature.WINDOW,
    Feature.WINDOW,
    Feature.CAUSAL | Feature.CHUNK,
    Feature.CAUSAL | Feature.DOCUMENTS,
    Feature.CAUSAL | Feature.WINDOW | Feature.DOCUMENTS,
    Feature.CAUSAL | Feature.PADDING,
    Feature.CAUSAL | Feature.WINDOW | Feature.PADDING,
    Feature.PADDING,
    Feature.DENSE_MASK,
    Feature.CAUSAL | Feature.BIAS,
    Feature.CAUSAL | Feature.SOFTCAP,
    Feature.CAUSAL | Feature.WEIGHTS,
    Feature.CAUSAL | Feature.DEVICE_OFFSET,
    Feature.CAUSAL | Feature.WINDOW | Feature.DEVICE_OFFSET,
)
# (q_length, kv_length, q_offset): whole, chunk of a longer one, decode, decode in a static cache
_LENGTHS = ((70, 70, 0), (7, 33, 26), (1, 33, 32), (1, 40, 20))
_GROUPS = ((4, 4), (4, 2), (8, 2), (5, 1), (14, 2), (8, 1))
_HEAD_DIMS = ((64, 64), (128, 128), (192, 128), (64, 128), (80, 80), (256, 256))


def cases(capability: Capability, device: str | None = None) -> list[Case]:
    """All cases of the contract that a capability claims to cover.

    Args:
        capability: what the backend says of itself.
        device: where to run; the first of the capability's devices by default.
    """
    device = device or sorted(capability.devices)[0]
    return [c for c in _variations(device) if not capability.refusals(needs_of(c))]


def needs_of(case: Case) -> Needs:
    """What a case asks for."""
    cuda = torch.device(case.device).type == "cuda"
    return Needs(
        device=torch.device(case.device).type,
        compute_capability=torch.cuda.get_device_capability(case.device) if cuda else None,
        dtype=case.dtype,
        num_heads=case.num_heads,
        num_kv_heads=case.num_kv_heads,
        qk_head_dim=case.qk_head_dim,
        v_head_dim=case.v_head_dim,
        decode=case.q_length == 1,
        features=case.features,
    )


def _variations(device: str) -> Iterator[Case]:
    """Every kind of mask at every length with and without gradients, then one axis at a time."""
    sink, train = Feature.SINK_PER_HEAD, Feature.BACKWARD | Feature.SINK_GRADIENT
    for kind in _KINDS:
        for q_length, kv_length, q_offset in _LENGTHS:
            if Feature.DOCUMENTS not in kind or q_length == kv_length:
                base = Case(kind | sink, q_length, kv_length, q_offset, device=device)
                yield base
                yield replace(base, features=base.features | train)
    plain = Case(Feature.CAUSAL | sink | train, 70, 70, device=device)
    decode = Case(Feature.CAUSAL | sink, 1, 33, 32, device=device)
    for base in (plain, decode):
        yield from _geometries(base)
        yield from _sink_levels(base)
    yield from _sink_levels(replace(plain, features=plain.features | Feature.WINDOW))
    yield replace(plain, features=plain.features | Feature.BIAS | Feature.BIAS_GRADIENT)


def _geometries(base: Case) -> Iterator[Case]:
    yield replace(base, dtype=torch.float64)
    yield replace(base, dtype=torch.float16)
    for dtype in (torch.float32, torch.bfloat16):
        for num_heads, num_kv_heads in _GROUPS:
            yield replace(base, dtype=dtype, num_heads=num_heads, num_kv_heads=num_kv_heads)
        for qk, v in _HEAD_DIMS:
            yield replace(base, dtype=dtype, qk_head_dim=qk, v_head_dim=v)
    for window in (1, 32, base.kv_length, 2 * base.kv_length):
        yield replace(base, features=base.features | Feature.WINDOW, window=window)
    if base.q_length < base.kv_length:
        yield replace(base, kv_length=base.kv_length + 7, poisoned=True)


def _sink_levels(base: Case) -> Iterator[Case]:
    for sinks in SINKS[1:]:
        features = base.features
        if sinks == "none":
            features &= ~(Feature.SINK_PER_HEAD | Feature.SINK_GRADIENT)
        yield replace(base, sinks=sinks, features=features, num_heads=8)
    yield replace(base, features=(base.features & ~Feature.SINK_PER_HEAD) | Feature.SINK_PER_TOKEN)
