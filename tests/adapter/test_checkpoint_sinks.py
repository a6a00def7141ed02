"""What the loading came to: sink values, and sinks that are missing, of another shape, or left over."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from adapter.checkpoint import check_loading_info, check_sink_values, errors
from adapter.checkpoint.sink_names import is_sink_key, registered_spellings
from tests.checkpoints import SINK
from tests.families import BASE, save

NAMES = [f"model.layers.{layer}.self_attn.sinks" for layer in range(4)]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save("gpt_oss", tmp_path)
    return tmp_path


def rewrite(folder: Path, change: dict[str, torch.Tensor | None]) -> None:
    """Replaces tensors of the checkpoint; None removes one."""
    state = load_file(folder / "model.safetensors") | change
    save_file({k: v for k, v in state.items() if v is not None}, folder / "model.safetensors", {"format": "pt"})


def load(folder: Path, **kwargs: object) -> tuple[torch.nn.Module, dict[str, object]]:
    return AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **kwargs)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_finite_and_minus_infinite_sinks_pass(dtype: torch.dtype) -> None:
    check_sink_values(
        [("a", torch.tensor([float("-inf"), 2.0, -1e4], dtype=dtype)), ("b", torch.zeros(0, dtype=dtype))]
    )
    check_sink_values([("huge", torch.tensor([1e30])), ("wide", torch.tensor([1e300], dtype=torch.float64))])


def test_meta_sinks_are_skipped() -> None:
    check_sink_values([("a", torch.empty(4, device="meta"))])


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ([2.0, float("nan")], "1 NaN in 2 values"),
        ([float("inf")] * 3, "3 +inf in 3 values"),
        ([float("nan"), float("inf"), float("-inf")], "1 NaN and 1 +inf in 3 values"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2])
def test_nan_and_infinite_sinks_are_refused(values: list[float], found: str, dtype: torch.dtype) -> None:
    sinks = [("fine", torch.ones(2)), (SINK, torch.nn.Parameter(torch.tensor(values).to(dtype), requires_grad=False))]
    with pytest.raises(errors.SinkValueError) as caught:
        check_sink_values(sinks)
    for text in ("[SINK-411]", SINK, found, "-inf is fine"):
        assert text in str(caught.value)


def test_a_good_load_passes(saved: Path) -> None:
    model, info = load(saved)
    check_loading_info(info, NAMES, False, model_keys=model.state_dict())


def test_missing_sinks_are_refused_unless_training_from_scratch(saved: Path) -> None:
    rewrite(saved, dict.fromkeys(NAMES))
    _, info = load(saved)
    with pytest.raises(errors.MissingSinkError) as caught:
        check_loading_info(info, NAMES, False)
    for text in ("[SINK-412]", *NAMES, "allow_missing_sinks=True", "from scratch"):
        assert text in str(caught.value)
    check_loading_info(info, NAMES, True)


def test_one_missing_sink_is_enough(saved: Path) -> None:
    rewrite(saved, {NAMES[2]: None})
    _, info = load(saved)
    with pytest.raises(errors.MissingSinkError, match=r"layers\.2\.self_attn\.sinks"):
        check_loading_info(info, NAMES, False)


def test_missing_weights_that_are_no_sinks_are_left_to_transformers() -> None:
    check_loading_info({"missing_keys": {"lm_head.weight"}, "mismatched_keys": {("a", (1,), (2,))}}, NAMES, False)


def test_many_missing_sinks_are_counted() -> None:
    names = [f"layers.{layer:02}.sinks" for layer in range(36)]
    with pytest.raises(errors.MissingSinkError, match=r"'layers\.03\.sinks' and 32 more"):
        check_loading_info({"missing_keys": set(names)}, names, False)


@pytest.mark.parametrize("allow_missing_sinks", [False, True])
def test_wrong_shape_is_refused_with_both_shapes(saved: Path, allow_missing_sinks: bool) -> None:
    rewrite(saved, {NAMES[1]: torch.ones(8)})
    _, info = load(saved, ignore_mismatched_sizes=True)
    with pytest.raises(errors.SinkShapeError) as caught:
        check_loading_info(info, NAMES, allow_missing_sinks)
    for text in ("[SINK-413]", NAMES[1], "[8] in the checkpoint", "[4] in the model", "attention heads"):
        assert text in str(caught.value)


def test_sinks_for_a_class_without_sinks_are_refused(saved: Path) -> None:
    config = LlamaConfig(**BASE, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    model, info = LlamaForCausalLM.from_pretrained(saved, config=config, output_loading_info=True)
    with pytest.raises(errors.UnexpectedSinkError) as caught:
        check_loading_info(info, [], True, model_keys=model.state_dict())
    for text in ("[SINK-414]", *NAMES, "no place for them"):
        assert text in str(caught.value)


@pytest.mark.parametrize("leaf", ["attn_sink", "softmax_offset", "learnable_sink_param", "sink_proj.weight", "sinks"])
def test_every_spelling_is_known(leaf: str) -> None:
    key = f"layers.0.self_attn.{leaf}"
    if leaf == "softmax_offset" and "softmax_offset" not in registered_spellings():
        pytest.skip("this transformers renames no softmax_offset to a sink")
    with pytest.raises(errors.UnexpectedSinkError, match=leaf):
        check_loading_info({"unexpected_keys": {key}}, [], False)


def test_a_layer_cut_off_is_no_fault(saved: Path) -> None:
    model, info = load(saved, num_hidden_layers=2)
    assert NAMES[3] in info["unexpected_keys"]
    check_loading_info(info, NAMES[:2], False, model_keys=model.state_dict())


@pytest.mark.parametrize("extra", ["attn_sink", "sink_proj.weight"])
def test_a_left_over_sink_beside_a_used_one_is_refused(saved: Path, extra: str) -> None:
    key = f"model.layers.0.self_attn.{extra}"
    rewrite(saved, {key: torch.ones(4)})
    model, info = load(saved)
    with pytest.raises(errors.UnexpectedSinkError, match=extra):
        check_loading_info(info, NAMES, False, model_keys=model.state_dict())


def test_unexpected_weights_that_are_no_sinks_are_left_to_transformers() -> None:
    check_loading_info({"unexpected_keys": {"hc_sinkhorn", "sinks.norm.weight", "bias"}}, [], False)


@pytest.mark.parametrize(
    ("key", "is_sink"),
    [
        ("a.sinks", True),
        ("a.Attn_Sink", True),
        ("sink", True),
        ("a.sink_proj.weight", True),
        ("a.sink_proj.bias", True),
        ("attention_sink_bias", True),
        ("a.sinkhorn", False),
        ("a.sinking", False),
        ("sinks.a", False),
        ("weight", False),
    ],
)
def test_sink_keys(key: str, is_sink: bool) -> None:
    assert is_sink_key(key) is is_sink
