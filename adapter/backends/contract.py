"""What every backend must compute: cases to run it on, and the check against the reference.

For the tests of a backend, this project's or another's:
`@pytest.mark.parametrize("case", contract.cases(MINE.capability, device="cuda"), ids=str)` over a test that calls
`contract.check(MINE, case)`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import ProofError
from .call import Attended, AttentionCall
from .cases import Case, build, cases
from .eager import BACKEND as _EAGER
from .reference import BACKEND as _REFERENCE

if TYPE_CHECKING:
    from .registry import Backend

__all__ = ["Case", "Measured", "build", "cases", "check", "measure"]

_FLOOR = {torch.float64: 1e-9, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@dataclass(frozen=True)
class Measured:
    """The largest error of one tensor against the fp64 reference, and what is allowed.

    Args:
        tensor: output, weights, or the gradient's name.
        error: max |backend - reference|; inf when the backend has NaN or infinity.
        allowed: twice the error of same-dtype eager, and a floor of a few units of rounding of the largest entry.
    """

    tensor: str
    error: float
    allowed: float

    @property
    def passed(self) -> bool:
        """Whether the error is within what is allowed."""
        return self.error <= self.allowed


def check(backend: Backend, case: Case) -> None:
    """Run one case.

    Raises:
        ProofError: a tensor is off; names the backend, the case, the tensor and both numbers.
    """
    for m in measure(backend, case):
        if not m.passed:
            raise ProofError(
                f"backend {backend.name!r} is wrong: {m.tensor} is off by {m.error:.3g}, {m.allowed:.3g} is allowed",
                where=str(case),
            )


def measure(backend: Backend, case: Case) -> list[Measured]:
    """The errors of output, weights and gradients of one case. Leaves grad mode and random state alone."""
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.set_grad_enabled(case.differentiates))
        stack.enter_context(torch.autocast(torch.device(case.device).type, enabled=False))
        # The first call of a layer may stand inside activation checkpointing, whose hooks are not for this backward.
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(_same, _same))
        exact = _run(_REFERENCE.attend, case, torch.float64)
        plain = _run(_EAGER.attend, case, case.dtype)
        actual = _run(backend.attend, case, case.dtype)
    return [_compare(name, actual[name], exact[name], plain[name], _FLOOR[case.dtype]) for name in exact]


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _run(attend: Callable[[AttentionCall], Attended], case: Case, dtype: torch.dtype) -> dict[str, Tensor]:
    call = build(case, dtype)
    attended = attend(call)
    results = {"output": attended.output.detach()}
    if call.need_weights and attended.weights is not None:
        results["weights"] = attended.weights.detach()
    if case.differentiates:
        results.update(_gradients(call, attended.output, case))
    return results


def _gradients(call: AttentionCall, output: Tensor, case: Case) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(case.seed + 1)
    upstream = torch.randn(output.shape, generator=generator, dtype=torch.float64)
    named = {"query": call.query, "key": call.key, "value": call.value, "sinks": call.sinks, "bias": call.bias}
    wanted = {name: t for name, t in named.items() if t is not None and t.requires_grad}
    upstream = upstream.to(case.dtype).to(device=output.device, dtype=output.dtype)
    found = torch.autograd.grad(output, list(wanted.values()), upstream, allow_unused=True)
    pairs = zip(wanted.items(), found, strict=True)
    return {f"gradient of {name}": torch.zeros_like(t) if g is None else g for (name, t), g in pairs}


def _compare(name: str, actual: Tensor | None, exact: Tensor, plain: Tensor, floor: float) -> Measured:
    peak = exact.abs().max().item() if exact.numel() else 0.0
    allowed = 2 * _distance(plain, exact) + floor * max(peak, 1e-3)
    return Measured(name, _distance(actual, exact), allowed)


def _distance(actual: Tensor | None, exact: Tensor) -> float:
    if actual is None or actual.shape != exact.shape:
        return math.inf
    if not exact.numel():
        return 0.0
    distance = (actual.to(torch.float64) - exact).abs().max().item()
    return distance if math.isfinite(distance) else math.inf
