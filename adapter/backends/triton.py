"""The project's own Triton kernels: every feature of a call but dropout and returned weights, forward and backward."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..kernels import decode, operators, prefill
from ..kernels.masking import Masking
from .call import Attended, AttentionCall
from .capability import Capability, Feature, Needs

_MOST_DECODED = 16
"""Queries up to which a call is a decode: one pass over the keys, split over programs."""
_LARGEST_HEAD_DIM = 512
_DENSE = Feature.DENSE_MASK | Feature.BIAS
_LACKING = Feature.DROPOUT | Feature.WEIGHTS | Feature.BIAS_GRADIENT
_INTERPRETED = type(prefill._forward).__name__ == "InterpretedFunction"


def _head_dims(qk: int, v: int) -> str | None:
    return None if max(qk, v) <= _LARGEST_HEAD_DIM else f"head dims {qk}/{v} (at most {_LARGEST_HEAD_DIM})"


@dataclass(frozen=True)
class _Capability(Capability):
    """A capability that also knows what does not go together, and how the CPU is reached."""

    def refusals(self, needs: Needs) -> list[str]:
        """Every reason why the kernels cannot serve `needs`."""
        reasons = super().refusals(needs)
        if needs.device == "cpu" and not _INTERPRETED:
            hint = "device cpu (set TRITON_INTERPRET=1 before the import to run the kernels in the interpreter, slowly)"
            reasons = [hint if reason.startswith("device cpu") else reason for reason in reasons]
        if needs.dtype is torch.bfloat16 and _INTERPRETED:
            hint = "dtype bfloat16 (Triton's interpreter multiplies its bits; float16 and float32 are right there)"
            reasons = [hint if reason == "dtype bfloat16" else reason for reason in reasons]
        if needs.features & Feature.BACKWARD and needs.features & _DENSE:
            reasons.append("no backward through a dense mask or a bias")
        return reasons


class Triton:
    """Triton kernels for CUDA devices of compute capability 8.0 and above; the interpreter takes CPU tensors."""

    name = "triton"
    capability = _Capability(
        devices=frozenset({"cpu"} if _INTERPRETED else {"cuda"}),
        dtypes=frozenset({torch.float16, torch.float32} | (set() if _INTERPRETED else {torch.bfloat16})),
        features=~Feature.NONE & ~_LACKING,
        min_compute_capability=(8, 0),
        head_dims=_head_dims,
    )

    def unavailable(self) -> str | None:
        """None: what is missing shows when this module is imported."""
        return None

    def attend(self, call: AttentionCall) -> Attended:
        """Run the prefill or the decode kernel, whichever the number of queries asks for."""
        call = _as_kernels_take_it(call)
        masking = Masking.of(call.visibility, call.bias)
        trained = _is_trained(call)
        decoding = call.query.shape[2] <= _MOST_DECODED and masking.documents is None and not trained
        arguments = (call.query, call.key, call.value, call.sinks, call.scale, call.softcap)
        if trained or torch.compiler.is_compiling() or type(call.query) is not Tensor:
            operator = torch.ops.sinkhold.decode if decoding else torch.ops.sinkhold.prefill
            return Attended(operator(*arguments, *operators.flat(masking))[0])
        # Nothing to differentiate or trace: the dispatcher would only add its time.
        run = decode.attend if decoding else prefill.attend
        shape = (*call.query.shape[:3], call.key.shape[2])
        return Attended(run(*arguments, masking.expanded(*shape))[0])


def _is_trained(call: AttentionCall) -> bool:
    if not torch.is_grad_enabled():
        return False
    return any(t is not None and t.requires_grad for t in (call.query, call.key, call.value, call.sinks))


def _as_kernels_take_it(call: AttentionCall) -> AttentionCall:
    """One dtype, autocast's where it is on, and a positive scale."""
    device = call.query.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        call = replace(call, query=call.query.to(dtype), key=call.key.to(dtype), value=call.value.to(dtype))
    if call.key.dtype != call.query.dtype or call.value.dtype != call.query.dtype:
        dtype = call.query.dtype
        call = replace(call, key=call.key.to(dtype), value=call.value.to(dtype))
    if call.scale <= 0:
        return replace(call, query=_negated(call.query, call.scale), scale=abs(call.scale) or 1.0)
    return call


def _negated(query: Tensor, scale: float) -> Tensor:
    return -query if scale < 0 else query * 0


BACKEND = Triton()
