"""Every feature of the kernels against the reference, in the interpreter where there is no GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from adapter.backends.capability import Feature, Needs
from adapter.backends.triton import BACKEND
from adapter.kernels import decode, prefill
from adapter.kernels.masking import Masking

from .comparison import expected, gradients, in_double, random_call

REFERENCE_TOLERANCE = 1e-5
_DOCUMENTS = torch.tensor([[0] * 11 + [1] * 13 + [2] * 9, [5] * 33])
_PADDING = torch.ones(2, 33, dtype=torch.bool)
_PADDING[0, :14] = False
_PADDING[1, 29:] = False
FEATURES: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"right": 0},
    "window": {"right": 0, "left": 6},
    "two_sided_window": {"right": 5, "left": 7},
    "chunks": {"right": 0, "chunk_size": 10},
    "chunks_after_padding": {"right": 0, "chunk_size": 10, "chunk_start": torch.tensor([3, 14])},
    "documents": {"right": 0, "documents": _DOCUMENTS},
    "shuffled_documents": {"documents": torch.arange(66).view(2, 33) * 7 % 3},
    "padding": {"right": 0, "padding": _PADDING},
    "padded_window": {"right": 0, "left": 6, "padding": _PADDING},
    "offset": {"right": 0, "kv_length": 50, "q_offset": 17},
    "device_offset": {"right": 0, "left": 20, "kv_length": 50, "q_offset": torch.tensor(11)},
    "softcap": {"right": 0, "softcap": 3.0},
    "no_sink": {"right": 0, "sinks": None},
    "token_sinks": {"right": 0, "sinks": "token"},
    "group_5": {"right": 0, "heads": 10, "left": 4},
    "group_7": {"right": 0, "heads": 7, "kv_heads": 1},
    "uneven_widths": {"right": 0, "width": 24, "v_width": 16},
    "width_80": {"right": 0, "width": 80, "v_width": 48, "batch": 1},
    "sees_nothing": {"right": -5},
}
_CALL_TENSORS = ("chunk_start", "documents", "padding", "q_offset")


def _on(device: torch.device, options: dict[str, Any]) -> dict[str, Any]:
    moved = {k: v.to(device) for k, v in options.items() if k in _CALL_TENSORS and isinstance(v, torch.Tensor)}
    return {**options, **moved}


@pytest.mark.parametrize("name", FEATURES)
def test_forward_equals_the_reference(name: str, device: torch.device) -> None:
    call = random_call(device, **_on(device, FEATURES[name]))
    torch.testing.assert_close(BACKEND.attend(call).output.double(), expected(call), atol=REFERENCE_TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", FEATURES)
def test_gradients_equal_the_reference(name: str, device: torch.device) -> None:
    call = random_call(device, **_on(device, FEATURES[name]))
    for tensor in (call.query, call.key, call.value, call.sinks):
        if tensor is not None:
            tensor.requires_grad_()
    precise = in_double(call)
    output, truth = BACKEND.attend(call).output, expected(call)
    seed = torch.randn_like(output)
    from adapter.backends.reference import BACKEND as REFERENCE

    wanted = gradients(REFERENCE.attend(precise).output, precise, seed.double())
    torch.testing.assert_close(output.double(), truth, atol=REFERENCE_TOLERANCE, rtol=0)
    for found, right in zip(gradients(output, call, seed), wanted, strict=True):
        torch.testing.assert_close(found.double(), right, atol=4 * REFERENCE_TOLERANCE, rtol=0)


@pytest.mark.parametrize("options", [{"dense": True}, {"bias": True, "right": 0}], ids=["dense", "bias"])
def test_masks_that_have_no_name(options: dict[str, Any], device: torch.device) -> None:
    if "dense" in options:
        options = {"dense": torch.rand(2, 1, 33, 33, device=device) > 0.6}
    call = random_call(device, **options)
    torch.testing.assert_close(BACKEND.attend(call).output.double(), expected(call), atol=REFERENCE_TOLERANCE, rtol=0)


@pytest.mark.parametrize("splits", [1, 2, 3, 7])
@pytest.mark.parametrize("q_length", [1, 4])
def test_decode_does_not_depend_on_the_splits(splits: int, q_length: int, device: torch.device) -> None:
    call = random_call(device, q_length=q_length, kv_length=70, right=0, q_offset=70 - q_length)
    masking = Masking.of(call.visibility)
    output, _ = decode.attend(
        call.query, call.key, call.value, call.sinks, call.scale, None, masking, splits=splits
    )  # fmt: skip
    torch.testing.assert_close(output.double(), expected(call), atol=REFERENCE_TOLERANCE, rtol=0)


def test_decode_over_an_unwritten_cache(device: torch.device) -> None:
    call = random_call(device, q_length=1, kv_length=64, right=0, q_offset=torch.tensor(20, device=device))
    truth = expected(call)
    call.key[:, :, 21:] = float("nan")
    call.value[:, :, 21:] = float("nan")
    torch.testing.assert_close(BACKEND.attend(call).output.double(), truth, atol=REFERENCE_TOLERANCE, rtol=0)


def test_prefill_over_an_unwritten_cache(device: torch.device) -> None:
    call = random_call(device, q_length=20, kv_length=64, right=0, q_offset=torch.tensor(7, device=device))
    truth = expected(call)
    call.key[:, :, 27:] = float("nan")
    call.value[:, :, 27:] = float("nan")
    torch.testing.assert_close(BACKEND.attend(call).output.double(), truth, atol=REFERENCE_TOLERANCE, rtol=0)


@pytest.mark.parametrize("window", [None, 6])
def test_paged_cache_with_lengths_of_its_own(window: int | None, device: torch.device) -> None:
    page, lengths = 8, torch.tensor([37, 5], device=device)
    table = torch.randperm(20, device=device)[:16].view(2, 8).int()
    keys, values = torch.randn(2, 2, 64, 16, device=device), torch.randn(2, 2, 64, 16, device=device)
    pools = torch.full((2, 20, 2, page, 16), float("nan"), device=device)
    for row in range(2):
        for slot in range(int(lengths[row])):
            pools[0, table[row, slot // page], :, slot % page] = keys[row, :, slot]
            pools[1, table[row, slot // page], :, slot % page] = values[row, :, slot]
    query, sinks = torch.randn(2, 4, 2, 16, device=device), torch.randn(4, device=device) + 2
    output, _ = decode.over_cache(
        query, pools[0], pools[1], lengths, sinks, 0.25, window=window, block_table=table
    )  # fmt: skip
    for row in range(2):
        length = int(lengths[row])
        left = None if window is None else window - 1
        one = random_call(device, batch=1, q_length=2, kv_length=length, right=0, left=left, q_offset=length - 2)
        one.query, one.sinks = query[row : row + 1], sinks
        one.key, one.value = keys[row : row + 1, :, :length], values[row : row + 1, :, :length]
        torch.testing.assert_close(output[row : row + 1].double(), expected(one), atol=REFERENCE_TOLERANCE, rtol=0)


def test_ring_buffer_needs_no_order(device: torch.device) -> None:
    call = random_call(device, q_length=1, kv_length=16)
    lengths = torch.tensor([16, 9], device=device)
    call.visibility = call.visibility.with_(padding=torch.arange(16, device=device)[None] < lengths[:, None])
    truth = expected(call)
    output, _ = decode.over_cache(call.query, call.key, call.value, lengths, call.sinks, call.scale, ring=True)
    torch.testing.assert_close(output.double(), truth, atol=REFERENCE_TOLERANCE, rtol=0)


@pytest.mark.parametrize("sink", [float("-inf"), -50.0, 50.0, 1e4])
def test_extreme_sinks(sink: float, device: torch.device) -> None:
    call = random_call(device, right=0)
    call.sinks = torch.full((4,), sink, device=device)
    output, lse = prefill.attend(call.query, call.key, call.value, call.sinks, call.scale, None, Masking(ahead=0))
    torch.testing.assert_close(output.double(), expected(call), atol=REFERENCE_TOLERANCE, rtol=0)
    assert bool(torch.isfinite(lse).all())


def test_a_row_that_sees_nothing_has_its_sink_as_lse(device: torch.device) -> None:
    call = random_call(device, right=-40)
    assert call.sinks is not None
    output, lse = prefill.attend(call.query, call.key, call.value, call.sinks, call.scale, None, Masking(ahead=-40))
    assert not output.any()
    torch.testing.assert_close(lse, call.sinks[None, :, None].expand_as(lse))


@pytest.mark.parametrize("operator", ["prefill", "decode"])
def test_opcheck(operator: str, device: torch.device) -> None:
    from adapter.kernels import operators

    call = random_call(device, batch=1, heads=2, kv_heads=1, q_length=10, kv_length=10, right=0)
    for tensor in (call.query, call.key, call.value, call.sinks):
        assert tensor is not None
        tensor.requires_grad_(operator == "prefill")
    arguments = (call.query, call.key, call.value, call.sinks, call.scale, None)
    overload = getattr(torch.ops.sinkhold, operator).default
    torch.library.opcheck(overload, (*arguments, *operators.flat(Masking.of(call.visibility))))


def test_negative_scale_and_mixed_dtypes(device: torch.device) -> None:
    call = random_call(device, right=0)
    call.scale = -call.scale
    torch.testing.assert_close(BACKEND.attend(call).output.double(), expected(call), atol=REFERENCE_TOLERANCE, rtol=0)


def test_what_the_kernels_refuse(device: torch.device) -> None:
    call = random_call(device, dense=torch.ones(1, 1, 33, 33, dtype=torch.bool, device=device))
    call.query.requires_grad_()
    reasons = BACKEND.capability.refusals(Needs.of(call))
    assert reasons == ["no backward through a dense mask or a bias"]
    call = random_call(device, width=640)
    assert BACKEND.capability.refusals(Needs.of(call)) == ["head dims 640/640 (at most 512)"]
    assert Feature.DROPOUT not in BACKEND.capability.features


def test_the_cpu_is_refused_with_a_hint() -> None:
    program = (
        "import torch\n"
        "from adapter.backends.triton import BACKEND\n"
        "from adapter.backends.capability import Feature, Needs\n"
        "needs = Needs('cpu', None, torch.float32, 4, 2, 16, 16, False, Feature.NONE)\n"
        "print(BACKEND.capability.refusals(needs))\n"
    )
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=True)
    assert "set TRITON_INTERPRET=1" in found.stdout


def test_the_interpreter_refuses_bfloat16() -> None:
    program = (
        "import torch\n"
        "from adapter.backends.triton import BACKEND\n"
        "from adapter.backends.capability import Feature, Needs\n"
        "for dtype in (torch.bfloat16, torch.float16):\n"
        "    print(BACKEND.capability.refusals(Needs('cpu', None, dtype, 4, 2, 16, 16, False, Feature.NONE)))\n"
    )
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=True)
    assert found.stdout.splitlines() == [
        '["dtype bfloat16 (Triton\'s interpreter multiplies its bits; float16 and float32 are right there)"]', "[]",
    ]  # fmt: skip


def test_an_old_device_is_refused_by_name() -> None:
    from adapter.errors import BackendError
    from adapter.kernels.tuning import tile_for

    with pytest.raises(BackendError, match=r"compute capability 7\.5 is below 8\.0"):
        tile_for("prefill", (7, 5), 64, 2, False, 1024)


def test_a_model_runs_on_the_interpreted_kernels_when_they_are_asked_for() -> None:
    import adapter
    from tests.adapter.comparison import logits, relative, under_eager
    from tests.families import build, tokens

    model, ids = build("gpt_oss", num_hidden_layers=2), tokens(1, 9)
    theirs = under_eager(model, lambda m: logits(m, input_ids=ids))
    report = adapter.adapt(model, "triton")
    with torch.no_grad():
        assert relative(logits(model, input_ids=ids), theirs) <= 1e-5
    assert {name for layer in report.layers for name in layer.backends.values()} == {"triton"}
    adapter.restore(model)
    assert "triton" not in {name for layer in adapter.adapt(model).layers for name in layer.backends.values()}


def test_without_the_interpreter_the_cpu_is_refused_with_a_hint() -> None:
    code = """
import adapter
from tests.families import build
try:
    adapter.adapt(build("gpt_oss"), "triton")
except adapter.BackendError as error:
    print(error)
"""
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert "set TRITON_INTERPRET=1" in done.stdout, done.stderr
