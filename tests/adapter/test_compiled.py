"""Models in one traced graph: right, and without a q_length x kv_length tensor where the mask's meaning is known."""

from __future__ import annotations

import pytest
import torch
from functorch.compile import aot_module_simplified, make_boxed_func
from torch import nn
from transformers import masking_utils as hf

import adapter
from adapter.attention import Attention
from adapter.mask_functions import Unclassified, classify
from fusers.mask_writes import keeps_masks
from tests.adapter.comparison import logits, relative, under_eager
from tests.families import INSTALLED, build, tokens

LENGTH = 37
# The experts of these loop over what was routed to them, which no graph of torch holds.
TRACED = [name for name in INSTALLED if name != "openai_privacy_filter"]


def compiled(model, backend="aot_eager"):
    torch._dynamo.reset()
    return torch.compile(model, fullgraph=True, backend=backend)


@pytest.fixture(autouse=True)
def _forget_graphs():
    yield
    torch._dynamo.reset()


def trainable():
    """A model whose experts' backward is traced by every torch; that of grouped_mm is not on the CPU."""
    model = build("gpt_oss", num_hidden_layers=2)
    model.set_experts_implementation("batched_mm")
    return model


def inputs_of(case, ids):
    mask, positions = torch.ones_like(ids), torch.arange(ids.shape[1]).expand(ids.shape).clone()
    mask[0, :9] = 0
    positions[:, 20:] -= 20
    return {
        "plain": {},
        "padded": {"attention_mask": mask},
        "packed": {"position_ids": positions},
    }[case]


@pytest.mark.slow
@pytest.mark.parametrize("name", TRACED)
def test_one_graph_equals_eager(name):
    model, ids = build(name), tokens(2, LENGTH)
    for case in ("plain", "padded"):
        extra = inputs_of(case, ids)
        expected = under_eager(model, lambda m, extra=extra: logits(m, input_ids=ids, **extra))
        with adapter.adapted(model):
            assert all(m.mask_is_kept for m in model.modules() if isinstance(m, Attention))
            run = compiled(model)
            with torch.no_grad():
                ours = logits(run, input_ids=ids, **extra)
        real = extra.get("attention_mask", torch.ones_like(ids)).bool()
        assert relative(ours[real], expected[real]) <= 1e-5, case


def squares_in_graph(model, ids, **extra):
    """How many values of the model's graph, backward included, have two extents of the sequence's length."""
    counts = []

    def count(graph, _):
        found = [n for n in graph.graph.nodes if isinstance(n.meta.get("val"), torch.Tensor)]
        counts.append(sum(list(n.meta["val"].shape).count(LENGTH) > 1 for n in found))
        return make_boxed_func(graph.forward)

    def backend(graph, examples):
        return aot_module_simplified(graph, examples, fw_compiler=count, bw_compiler=count)

    with torch.enable_grad():
        logits(compiled(model, backend), input_ids=ids, **extra).sum().backward()
    assert len(counts) == 2
    return sum(counts)


@pytest.mark.parametrize("case", ["plain", "padded", "packed"])
def test_no_square_tensor_in_the_graph_of_a_training_step(case):
    model, ids = trainable(), tokens(2, LENGTH)
    extra = inputs_of(case, ids)
    adapter.adapt(model, "triton")
    assert squares_in_graph(model, ids, **extra) == 0


def test_packed_documents_stay_apart_in_a_graph():
    model, ids = build("gpt_oss", num_hidden_layers=2), tokens(2, LENGTH)
    extra = inputs_of("packed", ids)
    adapter.adapt(model)
    with torch.no_grad():
        expected = logits(model, input_ids=ids, **extra)
        ours = logits(compiled(model), input_ids=ids, **extra)
        alone = logits(model, input_ids=ids[:, 20:])
    assert relative(ours, expected) <= 1e-5
    assert relative(ours[:, 20:], alone) <= 1e-5


def test_gradients_of_a_graph_are_eagers():
    model, ids = trainable(), tokens(2, LENGTH)
    mask = inputs_of("padded", ids)["attention_mask"]

    def gradients(run):
        model.zero_grad()
        (logits(run, input_ids=ids, attention_mask=mask) * mask[..., None]).pow(2).mean().backward()
        return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    model.set_attn_implementation("eager")
    expected = gradients(model)
    adapter.adapt(model)
    ours = gradients(compiled(model))
    assert ours.keys() == expected.keys()
    for name, reference in expected.items():
        assert (ours[name] - reference).abs().max() <= 3e-4 * max(reference.abs().max().item(), 1e-2), name


@pytest.mark.parametrize("name", ["gpt_oss", "granite_swa"])
def test_one_graph_for_any_length(name):
    model = build(name)
    lengths = [tokens(2, length) for length in (7, 13, 29, 1)]
    expected = [under_eager(model, lambda m, ids=ids: logits(m, input_ids=ids)) for ids in lengths]
    graphs = []

    def count(graph, examples):
        graphs.append(graph)
        return graph.forward

    adapter.adapt(model)
    torch._dynamo.reset()
    run = torch.compile(model, fullgraph=True, dynamic=True, backend=count)
    with torch.no_grad():
        for ids, reference in zip(lengths, expected, strict=True):
            assert relative(logits(run, input_ids=ids), reference) <= 1e-5, ids.shape
    # One for the lengths of a prompt; a single token has a kernel of its own.
    assert len(graphs) == 2


def test_layers_compiled_by_themselves():
    model, ids = build("gpt_oss", num_hidden_layers=2), tokens(2, LENGTH)
    expected = under_eager(model, lambda m: logits(m, input_ids=ids))
    adapter.adapt(model)
    for layer in model.model.layers:
        layer.compile(fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert relative(logits(model, input_ids=ids), expected) <= 1e-5


class Written(nn.Module):
    """A model that hides key 0 by writing into the mask that it built."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.config = inner, inner.config

    def forward(self, input_ids):
        hidden = self.inner.model.embed_tokens(input_ids)
        positions = torch.arange(input_ids.shape[1])[None]
        mask = hf.create_causal_mask(self.config, hidden, None, None, position_ids=positions)
        mask[:, :, 3:, 0] = torch.finfo(mask.dtype).min
        rotary = self.inner.model.rotary_emb(hidden, positions)
        return self.inner.model.layers[1](hidden, attention_mask=mask, position_embeddings=rotary)


@pytest.mark.parametrize("traced", [False, True])
def test_a_mask_that_is_written_into_is_read_as_it_is(traced):
    model, ids = Written(build("gpt_oss", num_hidden_layers=2)), tokens(2, LENGTH)
    model.inner.set_attn_implementation("eager")
    with torch.no_grad():
        expected = model(ids)
        adapter.adapt(model)
        run = compiled(model) if traced else model
        assert relative(run(ids), expected) <= 1e-5


class Forwards:
    """Forwards that write into a mask, and some that do not."""

    class Entry(nn.Module):
        def forward(self, mask):
            mask[..., 0] = 1
            return mask

    class Sum(nn.Module):
        def forward(self, attention_mask):
            attention_mask += 1
            return attention_mask

    class Method(nn.Module):
        def forward(self, masks):
            masks["full"].masked_fill_(masks["full"] > 0, 0)
            return masks

    class Out(nn.Module):
        def forward(self, mask, x):
            return torch.add(mask, x, out=mask[0])

    class Kept(nn.Module):
        def forward(self, mask, x):
            x[0] = 1
            x.add_(mask)
            masks = {}
            for name in ("full", "window"):
                masks[name] = mask.masked_fill(mask > 0, 0)
            return mask + x

    class Row(nn.Module):
        def forward(self, mask, row):
            mask[row] = 0
            return mask


@pytest.mark.parametrize("name", ["Entry", "Sum", "Method", "Out", "Row"])
def test_writes_into_masks_are_seen(name):
    assert not keeps_masks(getattr(Forwards, name))
    assert keeps_masks(Forwards.Kept)


def test_a_class_without_a_source_may_write():
    assert not keeps_masks(type("Sourceless", (nn.Module,), {"forward": len}))


def meaning_in_a_graph(make):
    """What `classify` says of make() while a graph is traced; "none" where it has no name."""
    said = []

    def run(x):
        try:
            said.append(classify(make(x)))
        except Unclassified:
            said.append("none")
        return x + 1

    torch.compile(run, fullgraph=True, backend="eager")(torch.arange(6)[None])
    return said[0]


def test_traced_mask_functions_have_the_meaning_of_untraced_ones():
    window = hf.sliding_window_causal_mask_function
    assert meaning_in_a_graph(lambda _: hf.causal_mask_function) == {"right": 0}
    assert meaning_in_a_graph(lambda _: window(5)) == classify(window(5)) == {"left": 4, "right": 0}
    packed = meaning_in_a_graph(lambda ids: hf.and_masks(window(5), hf.packed_sequence_mask_function(ids)))
    assert packed.keys() == {"left", "right", "documents"}
    assert meaning_in_a_graph(lambda _: hf.or_masks(hf.causal_mask_function, window(5))) == "none"
    own = meaning_in_a_graph(lambda _: hf.and_masks(hf.causal_mask_function, lambda b, h, q, k: q == k))
    assert own == "none"


@pytest.mark.parametrize("windows", [(5,), (5, 3)])
def test_traced_masks_are_bit_equal_to_transformers_own(windows):
    ids = torch.tensor([[0, 1, 2, 0, 1, 2, 3]])

    def build_mask(ids):
        parts = [hf.sliding_window_causal_mask_function(w) for w in windows]
        function = hf.and_masks(*parts, hf.packed_sequence_mask_function(ids))
        return hf.sdpa_mask(batch_size=1, q_length=7, kv_length=7, mask_function=function, allow_is_causal_skip=False)

    assert torch.equal(torch.compile(build_mask, fullgraph=True, backend="eager")(ids), build_mask(ids))
