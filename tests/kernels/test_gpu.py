"""The kernels on a CUDA device, held to at most twice the error of same-dtype eager against fp64."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from adapter.backends.call import AttentionCall, Visibility
from adapter.backends.eager import BACKEND as EAGER
from adapter.backends.reference import BACKEND as REFERENCE
from adapter.backends.triton import BACKEND
from adapter.kernels import decode, prefill
from adapter.kernels.masking import Masking

from .comparison import expected, gradients, in_double, random_call, relative

pytestmark = pytest.mark.gpu
SHAPES = {
    "gpt_oss": (64, 8, 64, 64),
    "group_5": (20, 4, 128, 128),
    "group_7": (14, 2, 64, 64),
    "uneven": (16, 1, 192, 128),
    "narrow": (8, 2, 80, 80),
    "w96": (8, 4, 96, 96),
    "w256": (4, 2, 256, 256),
    "w512": (16, 1, 512, 512),
}
MASKS: dict[str, dict[str, Any]] = {
    "causal": {"right": 0},
    "full": {},
    "window": {"right": 0, "left": 127},
    "offset": {"right": 0, "q_offset": 200, "kv_length": 500},
    "chunks": {"right": 0, "chunk_size": 96},
    "documents": {"right": 0, "documents": torch.arange(300)[None].expand(2, 300) // 113},
    "padding": {"right": 0, "padding": torch.arange(300)[None] >= torch.tensor([[70], [0]])},
    "softcap": {"right": 0, "softcap": 20.0},
    "token_sinks": {"right": 0, "sinks": "token"},
}
DEVICE = torch.device("cuda")


def _call(shape: str, mask: str, dtype: torch.dtype, length: int = 300) -> AttentionCall:
    heads, kv_heads, width, v_width = SHAPES[shape]
    options = {"kv_length": length, **MASKS[mask]}
    options = {k: v.to(DEVICE) if isinstance(v, Tensor) else v for k, v in options.items()}
    return random_call(
        DEVICE, heads=heads, kv_heads=kv_heads, q_length=length, width=width, v_width=v_width, dtype=dtype, **options
    )


def _within_twice(found: Tensor, eager: Tensor, truth: Tensor) -> None:
    floor = torch.finfo(found.dtype).eps / 4
    assert relative(found, truth) <= 2 * relative(eager, truth) + floor


@pytest.mark.parametrize(("shape", "mask"), [*itertools.product(SHAPES, ("causal", "window"))])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_shapes(shape: str, mask: str, dtype: torch.dtype) -> None:
    _check_with_gradients(_call(shape, mask, dtype))


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("length", [1, 77, 300])
def test_masks(mask: str, length: int) -> None:
    if length != 300 and mask in ("documents", "padding", "offset"):
        pytest.skip("these masks have a length of their own")
    _check_with_gradients(_call("gpt_oss", mask, torch.bfloat16, length))


def _check_with_gradients(call: AttentionCall) -> None:
    tensors = [t for t in (call.query, call.key, call.value, call.sinks) if t is not None]
    for tensor in tensors:
        tensor.requires_grad_()
    precise = in_double(call)
    outputs = [BACKEND.attend(call).output, EAGER.attend(call).output, REFERENCE.attend(precise).output]
    _within_twice(*outputs)
    seed = torch.randn_like(outputs[0])
    found, eager = gradients(outputs[0], call, seed), gradients(outputs[1], call, seed)
    truth = gradients(outputs[2], precise, seed.double())
    for three in zip(found, eager, truth, strict=True):
        _within_twice(*three)


def test_fp32() -> None:
    call = _call("gpt_oss", "window", torch.float32)
    torch.testing.assert_close(BACKEND.attend(call).output.double(), expected(call), atol=1e-5, rtol=0)


@pytest.mark.parametrize("length", [127, 128, 129, 384, 385])
@pytest.mark.parametrize("window", [127, 128, 129, 513])
def test_window_edges(length: int, window: int) -> None:
    call = random_call(
        DEVICE, heads=16, q_length=length, kv_length=length, width=64, dtype=torch.bfloat16, right=0, left=window - 1
    )  # fmt: skip
    _within_twice(BACKEND.attend(call).output, EAGER.attend(call).output, expected(call))


@pytest.mark.parametrize("splits", [1, 2, 3, 7, 16, 40])
@pytest.mark.parametrize("q_length", [1, 2, 16])
@pytest.mark.parametrize("shape", ["gpt_oss", "group_5", "uneven", "w512"])
def test_decode(shape: str, q_length: int, splits: int) -> None:
    heads, kv_heads, width, v_width = SHAPES[shape]
    call = random_call(
        DEVICE, heads=heads, kv_heads=kv_heads, q_length=q_length, kv_length=1000, width=width, v_width=v_width,
        dtype=torch.bfloat16, right=0, q_offset=1000 - q_length,
    )  # fmt: skip
    masking = Masking.of(call.visibility)
    output, _ = decode.attend(call.query, call.key, call.value, call.sinks, call.scale, None, masking, splits=splits)
    _within_twice(output, EAGER.attend(call).output, expected(call))


@pytest.mark.parametrize("sink", [float("-inf"), -50.0, 50.0, 1e4])
def test_extreme_sinks(sink: float) -> None:
    call = _call("gpt_oss", "causal", torch.bfloat16)
    call.sinks = torch.full((64,), sink, device=DEVICE)
    output = BACKEND.attend(call).output
    if sink == 1e4:
        assert not output.any()
    else:
        _within_twice(output, EAGER.attend(call).output, expected(call))


def test_rows_that_see_nothing() -> None:
    call = random_call(DEVICE, heads=8, width=64, q_length=300, kv_length=300, dtype=torch.bfloat16, right=-200)
    for tensor in (call.query, call.key, call.value, call.sinks):
        assert tensor is not None
        tensor.requires_grad_()
    output = BACKEND.attend(call).output
    assert not output[:, :200].any()
    assert all(bool(torch.isfinite(g).all()) for g in gradients(output, call, torch.randn_like(output)))


def test_strides_of_any_kind() -> None:
    call = _call("gpt_oss", "causal", torch.bfloat16)
    plain = BACKEND.attend(call).output
    every_other = (
        Tensor.contiguous,
        lambda t: torch.stack([t, t], -1)[..., 0],
        lambda t: torch.cat([t, t], 3)[..., :64],
    )
    for layout in every_other:
        call.query, call.key, call.value = layout(call.query), layout(call.key), layout(call.value)
        torch.testing.assert_close(BACKEND.attend(call).output, plain, atol=0, rtol=0)


def test_offsets_beyond_32_bits() -> None:
    length, tail = (1 << 25) + 640, 512
    key = torch.empty(1, 1, length, 64, device=DEVICE, dtype=torch.bfloat16)
    value = torch.empty_like(key)
    key[:, :, -tail:].normal_()
    value[:, :, -tail:].normal_()
    for q_length in (1, 64):
        call = random_call(
            DEVICE, batch=1, heads=8, kv_heads=1, q_length=q_length, kv_length=tail, width=64, dtype=torch.bfloat16,
            right=0, left=127, q_offset=tail - q_length,
        )  # fmt: skip
        call.key, call.value = key[:, :, -tail:], value[:, :, -tail:]
        truth = expected(call)
        call.key, call.value = key, value
        call.visibility = Visibility(1, q_length, length, q_offset=length - q_length, left=127, right=0)
        assert relative(BACKEND.attend(call).output, truth) < 5e-3


def test_two_runs_have_the_same_bits() -> None:
    call = _call("gpt_oss", "causal", torch.bfloat16)
    for tensor in (call.query, call.key, call.value, call.sinks):
        assert tensor is not None
        tensor.requires_grad_()
    runs = []
    for _ in range(2):
        poison = torch.full((1 << 26,), float("nan"), device=DEVICE)
        del poison
        output = BACKEND.attend(call).output
        runs.append([output, *gradients(output, call, torch.ones_like(output))])
    assert all(torch.equal(a, b) and bool(torch.isfinite(a).all()) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize("window", [None, 128])
def test_graph_with_lengths_and_sinks_that_change(window: int | None) -> None:
    offset = torch.tensor(900, device=DEVICE)
    left = None if window is None else window - 1
    call = random_call(
        DEVICE, heads=64, kv_heads=8, q_length=1, kv_length=1024, width=64, dtype=torch.bfloat16, right=0, left=left,
        q_offset=offset,
    )  # fmt: skip
    assert call.sinks is not None
    clean = call.key.clone(), call.value.clone()
    BACKEND.attend(call)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = BACKEND.attend(call).output
    for length in (900, 5, 1000, 0):
        offset.fill_(length)
        call.sinks.normal_().add_(2)
        call.key.copy_(clean[0])
        call.value.copy_(clean[1])
        truth = expected(call)
        call.key[:, :, length + 1 :] = float("nan")
        call.value[:, :, length + 1 :] = float("nan")
        graph.replay()
        assert relative(output, truth) < 5e-3


def test_compile_checkpoint_and_autocast() -> None:
    call = _call("gpt_oss", "window", torch.bfloat16)
    leaves = [t.detach().requires_grad_() for t in (call.query, call.key, call.value, call.sinks) if t is not None]

    def attend(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor) -> Tensor:
        return BACKEND.attend(AttentionCall(query, key, value, call.scale, call.visibility, sinks)).output

    plain = attend(*leaves)
    wanted = torch.autograd.grad(plain.sum(), leaves)
    compiled = torch.compile(attend, fullgraph=True)(*leaves)
    checked = torch.utils.checkpoint.checkpoint(attend, *leaves, use_reentrant=False)
    for output in (compiled, checked):
        torch.testing.assert_close(output, plain, atol=0, rtol=0)
        for found, right in zip(torch.autograd.grad(output.sum(), leaves), wanted, strict=True):
            torch.testing.assert_close(found, right, atol=0, rtol=0)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert attend(*(t.float() for t in leaves)).dtype == torch.bfloat16


@pytest.mark.parametrize("length", [32768, 131072])
def test_memory_is_that_of_inputs_outputs_and_gradients(length: int) -> None:
    def rows(heads: int) -> Tensor:
        return torch.randn(1, length, heads, 64, device=DEVICE, dtype=torch.bfloat16).transpose(1, 2)

    query, key, value = rows(64), rows(8), rows(8)
    sinks = torch.zeros(64, device=DEVICE)
    trained = length == 32768
    leaves = [t.requires_grad_(trained) for t in (query, key, value, sinks)]
    call = AttentionCall(query, key, value, 0.125, Visibility(1, length, length, right=0), sinks)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() - sum(t.untyped_storage().nbytes() for t in leaves)
    output = BACKEND.attend(call).output
    if trained:
        seed = torch.ones_like(output)
        gradients_ = torch.autograd.grad(output, leaves, seed)
        kept = [*leaves, output, seed, *gradients_]
    else:
        kept = [*leaves, output]
    peak = torch.cuda.max_memory_allocated() - before
    assert peak <= 1.3 * sum(t.untyped_storage().nbytes() for t in kept)


def test_hopper_and_general_forward_agree() -> None:
    call = _call("gpt_oss", "causal", torch.bfloat16)
    assert call.sinks is not None
    arguments = (call.query, call.key, call.value, call.sinks, call.scale, None, Masking(ahead=0))
    from adapter.kernels.tuning import Tile

    general = prefill.attend(*arguments, Tile(64, 64, 4, 2))
    tuned = prefill.attend(*arguments)
    assert relative(tuned[0], general[0]) < 3e-3
    torch.testing.assert_close(tuned[1], general[1], atol=1e-5, rtol=1e-5)
