"""Blocks of keys merged by their log-sum-exps, the sink joined once: the whole, forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from adapter.backends.call import AttentionCall
from adapter.backends.reference import BACKEND as REFERENCE
from adapter.parallel.partial import Partial, SdpaPartial, TritonPartial
from adapter.parallel.ring import _join, _merged, _nothing, _sink_gradient

from .comparison import gradients, in_double, random_call

_BLOCK = 11
_DOCUMENTS = torch.tensor([[0] * 9 + [1] * 15 + [2] * 9, [5] * 33])
_PADDING = torch.ones(2, 33, dtype=torch.bool)
_PADDING[0, :14] = False
_GAP = torch.ones(2, 33, dtype=torch.bool)
_GAP[0, 11:22] = False
CASES: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"right": 0},
    "window": {"right": 0, "left": 6},
    "documents": {"right": 0, "documents": _DOCUMENTS},
    "padding": {"right": 0, "padding": _PADDING},
    "no_sink": {"right": 0, "sinks": None},
    "uneven_widths": {"right": 0, "width": 24, "v_width": 16},
    "softcap": {"right": 0, "softcap": 3.0},
    "huge_logits_are_hidden": {"right": 0, "padding": _GAP},
}


def parts(call: AttentionCall) -> list[tuple[slice, AttentionCall]]:
    """The call cut into blocks of keys, for all queries."""
    length = call.query.shape[2]
    found = []
    for start in range(0, length, _BLOCK):
        block = call.narrow(0, length, start, start + _BLOCK)
        first, last = block.visibility.kv_range()
        if last > first:
            found.append((slice(start, start + _BLOCK), block))
    return found


@pytest.mark.parametrize(
    ("partial", "name"),
    [(p, n) for p in (SdpaPartial(), TritonPartial()) for n in CASES if (p.name, n) != ("sdpa", "softcap")],
    ids=lambda value: getattr(value, "name", value),
)
def test_merged_blocks_equal_the_reference(partial: Partial, name: str, device: torch.device) -> None:
    if partial.name == "sdpa" and device.type == "cuda":
        pytest.skip("sdpa has no backward under a mask there")
    options = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in CASES[name].items()}
    call = random_call(device, **options)
    if name.startswith("huge"):
        call.key[0, :, 11:22] *= 200  # nobody may hear of them
    exact = in_double(call)
    for tensor in (exact.query, exact.key, exact.value, exact.sinks):
        if tensor is not None:
            tensor.requires_grad_()
    truth = REFERENCE.attend(exact).output
    upstream = torch.randn_like(truth)
    wanted = gradients(truth, exact, upstream)

    output, lse = _nothing(call.query, call.value)
    for _, block in parts(call):
        output, lse = _merged(output, lse, *partial.forward(block))
    output, lse_s = _join(output, lse, call.sinks)
    grad = upstream.float()
    dq, dk, dv = (torch.zeros_like(t) for t in (call.query, call.key, call.value))
    for columns, block in parts(call):
        more = partial.backward(block, grad, output, lse_s)
        dq += more[0]
        dk[:, :, columns] += more[1]
        dv[:, :, columns] += more[2]
    found = [dq, dk, dv]
    if call.sinks is not None:
        found.append(_sink_gradient(call.sinks, grad, output, lse_s))
    assert (output - truth).abs().max() <= 1e-5
    for ours, theirs in zip(found, wanted, strict=True):
        assert (ours - theirs).abs().max() <= 4e-5 * max(1.0, theirs.abs().max())
