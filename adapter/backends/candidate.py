"""The Triton kernels with one tile given, as a backend that the contract can check."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from triton.errors import TritonError

from ..errors import ProofError
from ..kernels import backward, decode, prefill
from ..kernels.kinds import Kernel
from ..kernels.layer_shape import LayerShape
from ..kernels.masking import Masking
from ..kernels.timing import backward_tiles
from ..kernels.tuning import Tile
from . import contract
from .call import Attended, AttentionCall
from .capability import Capability, Feature
from .cases import Case
from .triton import BACKEND

# longer on a GPU, so that a pipeline of several stages is filled and emptied
_TOKENS = {"cpu": 34, "cuda": 700}
_MASKS = (
    Feature.CHUNK,
    Feature.DOCUMENTS,
    Feature.PADDING,
    Feature.SOFTCAP,
    Feature.DEVICE_OFFSET,
    Feature.SINK_PER_TOKEN,
    Feature.DENSE_MASK,
    Feature.BIAS,
)
_NOT_DECODED = Feature.DOCUMENTS
_NOT_TRAINED = Feature.DENSE_MASK | Feature.BIAS


class Candidate:
    """One kernel cut by `tile`; what else a call needs runs as it always does."""

    name = BACKEND.name
    capability: Capability = BACKEND.capability

    def __init__(self, kernel: Kernel, tile: Tile) -> None:
        self.kernel, self.tile = kernel, tile

    def unavailable(self) -> str | None:
        """As of the backend itself."""
        return BACKEND.unavailable()

    def attend(self, call: AttentionCall) -> Attended:
        """Run the one kernel, whatever the number of queries; trained calls through gradients of its own."""
        shape = (*call.query.shape[:3], call.key.shape[2])
        masking = Masking.of(call.visibility, call.bias).expanded(*shape)
        arguments = (call.query, call.key, call.value, call.sinks, call.scale, call.softcap, masking)
        if self.kernel == "decode":
            return Attended(decode.attend(*arguments, tile=self.tile)[0])
        if self.kernel == "prefill":
            return Attended(prefill.attend(*arguments, tile=self.tile)[0])
        return Attended(_Trained.apply(*arguments, backward_tiles(self.kernel, self.tile)))  # type: ignore[no-untyped-call]

    def problem(self, cases: list[Case]) -> str | None:
        """Why the tile cannot be used: it does not compile, or is wrong in one of the cases; None when it can."""
        try:
            for case in cases:
                contract.check(self, case)
        except ProofError as error:
            return f"{error.what}, in {error.where}"
        except TritonError as error:
            return f"it does not compile: {str(error).strip() or type(error).__name__}"
        except RuntimeError as error:
            if "PassManager" not in str(error):
                raise
            return f"it does not compile: {error}"
        return None


class _Trained(torch.autograd.Function):
    """Prefill with the backward kernels, one of them cut as asked."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        scale: float,
        softcap: float | None,
        masking: Masking,
        tiles: tuple[Tile | None, Tile | None],
    ) -> Tensor:
        out, lse = prefill.attend(query, key, value, sinks, scale, softcap, masking)
        ctx.save_for_backward(query, key, value, sinks, out, lse)
        ctx.rest = scale, softcap, masking, tiles
        return out

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> Any:
        scale, softcap, masking, tiles = ctx.rest
        query, key, value, sinks, out, lse = ctx.saved_tensors
        found = backward.gradients(
            query, key, value, sinks, out, lse, upstream[0], None, scale, softcap, masking, *tiles
        )  # fmt: skip
        return *found, None, None, None, None


def plain_case(shape: LayerShape, kernel: Kernel, device: torch.device) -> Case:
    """The layer's own mask over few tokens, at most two kv heads."""
    tokens, num_kv_heads = _TOKENS[device.type], min(2, shape.num_kv_heads)
    features = Feature.SINK_PER_HEAD | Feature.CAUSAL
    if shape.window is not None:
        features |= Feature.WINDOW
    if kernel.startswith("backward"):
        features |= Feature.BACKWARD | Feature.SINK_GRADIENT
    q_length = 1 if kernel == "decode" else tokens
    return Case(
        features=features,
        q_length=q_length,
        kv_length=tokens,
        q_offset=tokens - q_length,
        num_heads=num_kv_heads * shape.num_heads // shape.num_kv_heads,
        num_kv_heads=num_kv_heads,
        qk_head_dim=shape.qk_head_dim,
        v_head_dim=shape.v_head_dim,
        dtype=shape.dtype,
        device=str(device),
        window=min(shape.window or tokens, tokens // 3),
    )


def masked_cases(shape: LayerShape, kernel: Kernel, device: torch.device) -> list[Case]:
    """The plain case with each further mask, cap or kind of sink that the kernel may meet under the same tile."""
    plain = plain_case(shape, kernel, device)
    lacking = {"prefill": Feature.NONE, "decode": _NOT_DECODED}.get(kernel, _NOT_TRAINED)
    found = []
    for feature in _MASKS:
        if not feature & lacking:
            kept = plain.features & ~Feature.SINK_PER_HEAD if feature is Feature.SINK_PER_TOKEN else plain.features
            found.append(replace(plain, features=kept | feature))
    return found
