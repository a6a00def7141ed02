"""What is particular to sdpa: memory, cost, the gradient's limits and the layout of its output."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from adapter.backends import blocks, sdpa_math
from adapter.backends.sdpa import BACKEND
from adapter.errors import BackendError

from .helpers import attend, make


class Largest(TorchDispatchMode):
    """Records the largest tensor of any op, in elements, and the query-key pairs that the attention op reads."""

    elements = 0
    pairs = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for t in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(t, torch.Tensor):
                self.elements = max(self.elements, t.untyped_storage().nbytes() // t.element_size())
        if "flash_attention_for_cpu" in str(func) and "backward" not in str(func):
            self.pairs += args[0].shape[1] * args[0].shape[2] * args[1].shape[2]
        return result


def _long(n, heads=2, **mask):
    return make(n, n, heads=heads, kv_heads=1, dim=8, dtype=torch.float32, sinks=torch.full((heads,), 2.0), **mask)


MASKS = {
    "causal": lambda n: {"right": 0},
    "window": lambda n: {"right": 0, "left": 63},
    "padding": lambda n: {"right": 0, "padding": torch.arange(n)[None] >= 100},
    "documents": lambda n: {"right": 0, "documents": torch.arange(n)[None] // 256},
    "chunks": lambda n: {"right": 0, "chunk_size": 128},
    "offset on the device": lambda n: {"right": 0, "q_offset": torch.tensor(0)},
}


@pytest.mark.parametrize("kind", MASKS)
def test_no_tensor_of_length_squared(kind):
    n = 2048
    with Largest() as seen, torch.no_grad():
        output = sdpa_math.forward(_long(n, **MASKS[kind](n)))[0]
    assert output.isfinite().all()
    assert seen.elements <= 2 * 256 * n


@pytest.mark.parametrize(
    ("kind", "pairs_per_query"), [("window", 64 + 64), ("documents", 256 + 64), ("chunks", 128 + 128)]
)
def test_pairs_that_are_read_grow_linearly(kind, pairs_per_query):
    for n in (1024, 2048, 4096):
        with Largest() as seen, torch.no_grad():
            sdpa_math.forward(_long(n, heads=1, **MASKS[kind](n)))
        assert seen.pairs <= n * pairs_per_query


def test_a_plain_causal_call_and_a_decode_step_need_no_mask():
    for call in (_long(300, right=0), make(1, 300, left=40, right=0), make(1, 300, right=0)):
        for prepared in sdpa_math._prepared(call):
            assert prepared.piece.mask is None
            assert prepared.seeing is None


def test_heads_of_a_group_become_rows_in_decode():
    prepared = next(sdpa_math._prepared(make(1, 50, heads=8, kv_heads=2, right=0)))
    assert prepared.piece.query.shape[1:3] == (2, 4)
    tensor = torch.randn(2, 8, 3, 5)
    assert torch.equal(blocks.unpack(blocks.pack(tensor, 2), 8), tensor)


def test_the_second_derivative_is_refused_and_the_first_is_not():
    call = make(3, 3, grad=True, right=0, sinks=torch.full((4,), 2.0, dtype=torch.float64))
    (first,) = torch.autograd.grad(BACKEND.attend(call).output.sum(), call.query, create_graph=True)
    assert first.isfinite().all()
    with pytest.raises(BackendError, match="no second derivative"):
        torch.autograd.grad(first.sum(), call.key)


def test_what_it_computes_with_and_without_gradients_is_the_same():
    call = make(9, 9, grad=True, right=0, left=4, sinks=torch.full((4,), 2.0, dtype=torch.float64))
    recorded = BACKEND.attend(call).output
    with torch.no_grad():
        assert torch.equal(recorded, BACKEND.attend(call).output)
    with torch.inference_mode():
        assert torch.equal(recorded, BACKEND.attend(call).output)
    assert recorded.is_contiguous()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_strided_inputs_of_half_precision(dtype):
    call = make(6, 6, batch=2, dtype=dtype, right=0, sinks=torch.full((4,), 2.0))
    transposed = {n: getattr(call, n).transpose(2, 3).contiguous().transpose(2, 3) for n in ("query", "key", "value")}
    assert torch.equal(attend("sdpa", replace(call, **transposed)), attend("sdpa", call))


def test_frozen_keys_leave_gradients_to_the_others():
    call = make(4, 4, right=0, sinks=torch.full((4,), 2.0, dtype=torch.float64, requires_grad=True))
    (found,) = torch.autograd.grad(attend("sdpa", call).square().sum(), call.sinks)
    (expected,) = torch.autograd.grad(attend("reference", call).square().sum(), call.sinks)
    torch.testing.assert_close(found, expected)
