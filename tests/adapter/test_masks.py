"""The meaning of masks: classified without a dense tensor, computed in full where there is no name for them."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import LlamaConfig, masking_utils
from transformers.masking_utils import and_masks, causal_mask_function, eager_mask, or_masks

from adapter.masks import LazyMask, additive_mask, sinkhold_mask, visibility_of

PADDING = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1], [1] * 8], dtype=torch.bool)
DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2]] * 2)
LEFT_PADDING = torch.tensor([2, 0])

FUNCTIONS = {
    "causal": causal_mask_function,
    "bidirectional": masking_utils.bidirectional_mask_function,
    "window": masking_utils.sliding_window_causal_mask_function(3),
    "window both ways": masking_utils.sliding_window_bidirectional_mask_function(2),
    "chunk": masking_utils.chunked_causal_mask_function(3, LEFT_PADDING),
    "documents": and_masks(causal_mask_function, masking_utils.packed_sequence_mask_function(DOCUMENTS)),
    "window and documents": and_masks(
        masking_utils.sliding_window_causal_mask_function(2), masking_utils.packed_sequence_mask_function(DOCUMENTS)
    ),
    "image block": or_masks(causal_mask_function, lambda b, h, q, kv: (q >= 2) & (q < 5) & (kv >= 2) & (kv < 5)),
    "unknown": and_masks(causal_mask_function, lambda b, h, q, kv: (q - kv) % 2 == 0),
}


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
@pytest.mark.parametrize("padding", [None, PADDING], ids=["no padding", "padding"])
@pytest.mark.parametrize(("q_length", "kv_length", "q_offset"), [(8, 8, 0), (1, 8, 7), (3, 8, 5)])
def test_equals_transformers_eager_mask(function, padding, q_length, kv_length, q_offset):
    arguments = {
        "batch_size": 2, "q_length": q_length, "kv_length": kv_length, "q_offset": q_offset, "mask_function": function,
        "attention_mask": padding,
    }  # fmt: skip
    if function in (FUNCTIONS["documents"], FUNCTIONS["window and documents"]) and q_length != kv_length:
        pytest.skip("transformers packs documents only without a cache")
    expected = eager_mask(**arguments)
    assert torch.equal(sinkhold_mask(**arguments) + 0, expected)
    assert torch.equal(additive_mask(visibility_of(**arguments), torch.float32, torch.device("cpu")), expected)


@pytest.mark.parametrize("name", ["causal", "window", "chunk", "documents", "window both ways", "window and documents"])
def test_known_patterns_need_no_dense_tensor(name):
    visibility = visibility_of(batch_size=2, q_length=8, kv_length=8, mask_function=FUNCTIONS[name])
    assert visibility.dense is None


@pytest.mark.parametrize("name", ["image block", "unknown"])
def test_unknown_patterns_are_computed_in_full(name):
    assert visibility_of(batch_size=2, q_length=8, kv_length=8, mask_function=FUNCTIONS[name]).dense is not None


def test_padding_that_hides_nothing_is_left_out():
    visibility = visibility_of(batch_size=2, q_length=8, kv_length=8, attention_mask=torch.ones(2, 8, dtype=torch.bool))
    assert visibility.padding is None


def test_unwritten_slots_of_a_static_cache_are_hidden_by_causality():
    mask = torch.ones(2, 5, dtype=torch.bool)
    visibility = visibility_of(batch_size=2, q_length=5, kv_length=16, q_offset=torch.tensor(0), attention_mask=mask)
    assert visibility.padding is None
    assert not visibility.to_bool(torch.device("cpu"))[..., 5:].any()


def test_unwritten_slots_stay_padding_where_attention_looks_forward():
    visibility = visibility_of(
        batch_size=2, q_length=5, kv_length=8, mask_function=FUNCTIONS["bidirectional"],
        attention_mask=torch.ones(2, 5, dtype=torch.bool),
    )  # fmt: skip
    assert visibility.padding is not None
    assert not visibility.padding[:, 5:].any()


def lazy(dtype=torch.bfloat16) -> LazyMask:
    return LazyMask(visibility_of(batch_size=2, q_length=4, kv_length=4), dtype, "cpu", True)


def test_a_lazy_mask_holds_no_dense_tensor_until_it_is_touched():
    mask = lazy()
    assert mask.shape == (2, 1, 4, 4)
    assert mask.dtype is torch.bfloat16
    assert not mask._computed
    assert (mask[:, 0, :, :2] == 0).sum() == 14
    assert mask._computed


def test_moving_a_lazy_mask_keeps_its_meaning():
    for moved in (lazy().to(torch.float32), lazy().detach(), lazy().clone(), lazy().to("meta")):
        assert isinstance(moved, LazyMask)
        assert moved.visibility.right == 0


def test_a_lazy_mask_turned_to_bool_is_what_the_additive_mask_turned_to_bool_is():
    assert torch.equal(lazy().to(torch.bool), lazy().additive().to(torch.bool))


def test_extending_a_lazy_mask_gives_the_extended_additive_mask():
    extended = torch.cat([lazy(torch.float32), torch.zeros(2, 1, 4, 3)], dim=-1)
    assert not isinstance(extended, LazyMask)
    assert extended.shape == (2, 1, 4, 7)
    assert extended[0, 0, 0, 1] == torch.finfo(torch.float32).min


def test_full_attention_is_no_mask_only_where_the_model_allows_it():
    arguments = {"batch_size": 2, "q_length": 4, "kv_length": 4, "mask_function": FUNCTIONS["bidirectional"]}
    ones = torch.ones(2, 4, dtype=torch.bool)
    assert sinkhold_mask(**arguments, attention_mask=ones, allow_is_bidirectional_skip=True) is None
    assert torch.equal(sinkhold_mask(**arguments, attention_mask=ones) + 0, torch.zeros(2, 1, 4, 4))


def test_transformers_builds_its_masks_through_the_registered_function():
    import adapter  # noqa: F401

    config = LlamaConfig(attn_implementation="sinkhold")
    embeds = torch.zeros(2, 6, 4)
    mask = masking_utils.create_causal_mask(config, embeds, None, None)
    assert isinstance(mask, LazyMask)
    assert mask.packable
    padded = masking_utils.create_causal_mask(config, embeds, PADDING[:, :6].long(), None)
    assert not padded.packable
    packed = masking_utils.create_causal_mask(
        config, embeds, None, None, position_ids=torch.tensor([[0, 1, 2, 0, 1, 2]])
    )
    assert packed.visibility.documents is not None


def test_copies_of_a_lazy_mask_keep_their_meaning():
    assert copy.copy(lazy()).visibility.right == 0


def _entry(mask):
    mask[..., 0] = 5.0


def _method(mask):
    mask.fill_(5.0)


def _view(mask):
    mask[:, :, 2:].narrow(-1, 0, 2).fill_(5.0)


def _alias(mask):
    mask.detach().add_(5.0)


@pytest.mark.parametrize("write", [_entry, _method, _view, _alias])
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_a_write_into_a_lazy_mask_is_noticed(write, mode):
    with mode():
        mask = sinkhold_mask(batch_size=2, q_length=4, kv_length=4)
        expected = eager_mask(batch_size=2, q_length=4, kv_length=4)
        assert isinstance(mask, LazyMask)
        assert mask.sum() == expected.sum()
        assert not mask.written
        write(mask)
        write(expected)
        assert mask.written
        assert torch.equal(mask.additive(), expected)


def test_a_clone_is_written_alone():
    mask = sinkhold_mask(batch_size=2, q_length=4, kv_length=4)
    mask.clone().add_(5.0)
    assert not mask.written
