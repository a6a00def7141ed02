"""Short checks that must fail when the sink, or what a query may see, is wrong. Expectations come from outside."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from transformers import masking_utils as hf
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import adapter
from adapter.attention import attach, registered_attention, sinkhold_attention
from adapter.backends import registry
from adapter.backends.call import AttentionCall, Visibility
from adapter.errors import CallError, SinkError
from adapter.guard import check_call, check_heads, check_sinks
from adapter.masks import LazyMask, sinkhold_mask
from adapter.translate import build_call
from fusers.attention import AttentionFuser
from fusers.base import SinkKind
from tests.adapter.comparison import decode, logits, new_cache, relative, under_eager
from tests.families import build, set_sinks, tokens

from .situations import DOCUMENTS, PADDING, SINKS, SITUATIONS, call_of, expected_of, inputs_of


def run_backend(backend):
    """Every situation: the output without and with gradients, and the gradients."""
    for name, s in SITUATIONS.items():
        if s.softcap and backend == "sdpa":
            continue
        call, (output, gradients) = call_of(name), expected_of(name)
        with torch.no_grad():
            close(registry.get(backend).attend(call).output, output, name)
        if gradients is None:
            continue
        found = registry.get(backend).attend(call).output
        close(found, output, name)
        wanted = (call.query, call.key, call.value, call.sinks)
        for actual, exact in zip(torch.autograd.grad(found, wanted, inputs_of(name)[5]), gradients, strict=True):
            close(actual, exact, f"{name}, gradient")


def close(actual, exact, what):
    torch.testing.assert_close(actual, exact, atol=1e-9, rtol=1e-9, msg=lambda text: f"{what}: {text}")


def run_precision(backend):
    """With logits of zero the output is 1 / (keys + exp(sink)): a sink that is rounded to bf16 misses by percents."""
    sinks = torch.tensor([8.27, 4.14], requires_grad=True)
    zero = torch.zeros(1, 2, 40, 8, dtype=torch.bfloat16)
    call = AttentionCall(zero, zero, zero + 64, 1.0, Visibility(1, 40, 40), sinks=sinks)
    exact = 64 * 40 / (40 + sinks.double().exp())
    output = registry.get(backend).attend(call).output.double()
    assert ((output - exact[:, None]).abs() <= 0.01 * exact[:, None]).all()


def run_extremes(backend):
    """A sink of minus infinity is no sink, one of 1e4 takes everything, and rows that see nothing are zero."""
    call = call_of("causal")
    attend = registry.get(backend).attend
    with torch.no_grad():
        without = attend(replace(call, sinks=None)).output
        close(attend(replace(call, sinks=torch.full((4,), float("-inf")))).output, without, "-inf")
        assert not attend(replace(call, sinks=torch.full((4,), 1e4))).output.any()
        blind = replace(call, visibility=call.visibility.with_(padding=torch.zeros(2, 12, dtype=torch.bool)))
        assert not attend(blind).output.any()
        assert not attend(replace(blind, sinks=None)).output.any()
        half = attend(replace(call, visibility=call.visibility.with_(padding=PADDING))).output
        assert not half[0, :3].any()


def in_layer(name, index=0):
    """An adapted model's attention module and its Attention."""
    model = adapted(name)
    body = getattr(model.model, "language_model", model.model)
    module = body.layers[index].self_attn
    return module, registered_attention(module)


KINDS = {
    "mimo_v2_flash": {"layer_types": ["full_attention", "sliding_attention"]},
    "inkling2": {"layer_types": ["hybrid_sliding", "hybrid"]},
}


def small(name):
    return build(name, num_hidden_layers=2, **KINDS.get(name, {}))


def adapted(name, backend="eager"):
    model = small(name)
    adapter.adapt(model, backend, recording=False)
    return model


def run_guard():
    """Each way of handing over a sink that would not be applied is an error."""
    module, attn = in_layer("gpt_oss")
    check_sinks(module, attn, module.sinks)
    check_sinks(module, attn, module.sinks.view(1, -1))
    for sink in (None, module.sinks[:2], module.sinks.detach().clone()):
        must_raise(SinkError, check_sinks, module, attn, sink)
    must_raise(SinkError, check_heads, module, attn, torch.zeros(1, 4, 3, 16), torch.zeros(1))
    must_raise(CallError, check_call, module, attn, {"block_indices": torch.zeros(1)})
    must_raise(CallError, check_call, module, attn, {"scaling": 0.5})
    must_raise(CallError, check_call, module, attn, {"sliding_window": 9})
    q, kv = torch.zeros(1, 4, 3, 16), torch.zeros(1, 2, 3, 16)
    with pytest.raises(SinkError, match="two sinks"):
        sinkhold_attention(module, q, kv, kv, s_aux=module.sinks, sinks=torch.zeros(1, 4, 3, 1))
    must_raise(SinkError, sinkhold_attention, module, q, kv, kv, scaling=0.25)


def run_guard_of_other_kinds():
    """Layers without a sink, and those where each token has its own."""
    without = in_layer("mimo_v2_flash", 0)
    must_raise(SinkError, check_sinks, *without, torch.zeros(4))
    computed = in_layer("inkling2")
    check_sinks(*computed, torch.zeros(1, 4, 5, 1))
    must_raise(SinkError, check_sinks, *computed, None)
    must_raise(SinkError, check_sinks, *computed, torch.zeros(4))
    must_raise(SinkError, check_heads, *computed, torch.zeros(1, 4, 5, 16), torch.zeros(1, 2, 5, 1))


def must_raise(kind, function, *args, **kwargs):
    with pytest.raises(kind):
        function(*args, **kwargs)


def run_calls():
    """Keywords and masks of a call reach the backends with their meaning."""
    module, attn = in_layer("gpt_oss")
    q, kv = torch.randn(1, 4, 6, 16), torch.randn(1, 2, 6, 16)

    def built(mask=None, **kwargs):
        return build_call(module, attn, (q, kv, kv), mask, module.sinks, kwargs)

    def visible(call):
        found = call.visibility.to_bool(torch.device("cpu"))
        return torch.ones(1, 1, 6, 6, dtype=torch.bool) if found is None else found.expand(1, 1, 6, 6)

    lower = torch.ones(6, 6, dtype=torch.bool).tril()[None, None]
    assert built().scale == 0.25
    assert built(scaling=0.5).scale == 0.5
    assert torch.equal(visible(built(lower)), lower)
    floating = torch.zeros(1, 1, 6, 6).masked_fill(~lower, torch.finfo(torch.float32).min) + 0.5 * lower
    assert torch.equal(visible(built(floating)), lower)
    assert torch.equal(built(floating).bias[lower], floating[lower])
    assert torch.equal(visible(built(is_causal=True)), lower)
    assert torch.equal(visible(built(is_causal=True, sliding_window=3)), lower & ~lower.tril(-3))
    bias = torch.randn(1, 4, 6, 6)
    assert torch.equal(built(position_bias=bias).bias, bias)
    assert torch.equal(built(floating, position_bias=bias).bias[..., lower[0, 0]], (bias + 0.5)[..., lower[0, 0]])
    assert built(softcap=3.0).softcap == 3.0
    blocks = torch.block_diag(torch.ones(2, 2), torch.ones(4, 4)).bool()[None, None]
    assert torch.equal(visible(built(cu_seq_lens_k=torch.tensor([0, 2, 6]))), blocks)
    assert torch.equal(visible(built(position_ids=torch.tensor([[0, 1, 0, 1, 2, 3]]))), blocks)
    indices = torch.tensor([[[0, 1], [1, 0], [2, 0], [3, 2], [4, 0], [5, 4]]])
    chosen = torch.zeros(1, 1, 6, 6, dtype=torch.bool).scatter(3, indices[:, None], True)
    assert torch.equal(visible(built(indices=indices)), chosen)
    assert torch.equal(visible(built(lower & chosen.flip(3), indices=indices)), lower & chosen.flip(3) & chosen)
    lazy = sinkhold_mask(batch_size=1, q_length=6, kv_length=6)
    assert torch.equal(visible(built(lazy)), lower)
    for _ in range(2):
        assert torch.equal(visible(built(lazy, position_ids=torch.tensor([[0, 1, 0, 1, 2, 3]]))), lower & blocks)
    assert torch.equal(visible(built(lazy, position_ids=torch.arange(6)[None])), lower)


FUNCTIONS = {
    "causal": hf.causal_mask_function,
    "window": hf.sliding_window_causal_mask_function(3),
    "both ways": hf.sliding_window_bidirectional_mask_function(2),
    "window twice": hf.and_masks(hf.sliding_window_causal_mask_function(5), hf.sliding_window_overlay(2)),
    "chunk": hf.chunked_causal_mask_function(3, torch.tensor([2, 0])),
    "documents": hf.and_masks(hf.causal_mask_function, hf.packed_sequence_mask_function(DOCUMENTS[:, 2:10])),
    "odd": hf.and_masks(hf.causal_mask_function, lambda b, h, q, kv: (q - kv) % 2 == 0),
}


def run_masks():
    """What transformers asks of a mask builder, against its own eager mask."""
    padding = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1], [1] * 8], dtype=torch.bool)
    later = torch.tensor([[1, 0, 0, 1, 1, 1, 1, 1, 0, 1, 1], [1] * 11], dtype=torch.bool)
    for name, function in FUNCTIONS.items():
        for mask in (None, padding):
            same_mask(q_length=8, kv_length=8, mask_function=function, attention_mask=mask)
        if name != "documents":
            same_mask(q_length=2, kv_length=8, q_offset=6, mask_function=function, attention_mask=padding)
            same_mask(q_length=3, kv_length=8, q_offset=8, kv_offset=3, mask_function=function, attention_mask=later)
    offset = torch.tensor(4)
    held = sinkhold_mask(batch_size=2, q_length=3, kv_length=12, q_offset=offset)
    wanted = hf.eager_mask(batch_size=2, q_length=3, kv_length=12, q_offset=4)
    offset.add_(3)  # as a static cache does between the mask and the attention
    assert torch.equal(held + 0, wanted)
    assert isinstance(held.to(torch.bfloat16), LazyMask)
    assert not sinkhold_mask(batch_size=2, q_length=8, kv_length=8, attention_mask=padding).packable
    assert not sinkhold_mask(batch_size=2, q_length=2, kv_length=8, q_offset=6).packable
    assert sinkhold_mask(batch_size=2, q_length=8, kv_length=8).packable


def same_mask(**arguments):
    arguments.setdefault("mask_function", hf.causal_mask_function)
    assert torch.equal(sinkhold_mask(batch_size=2, **arguments) + 0, hf.eager_mask(batch_size=2, **arguments))


IDS = tokens(2, 15)


@functools.cache
def eager_logits(name):
    """What transformers' eager attention gives: forward, padded forward and decode."""
    model = small(name)
    return [under_eager(model, run) for run in RUNS]


def _decode(model):
    return decode(model, IDS, 4, new_cache(model, "dynamic", 16))


def _padded(model):
    mask = torch.ones(2, 15, dtype=torch.long)
    mask[0, :5] = 0
    return logits(model, input_ids=IDS, attention_mask=mask)[1]


def _static(model):
    return decode(model, IDS, 2, new_cache(model, "static", 20), chunk=5)


RUNS = (lambda model: logits(model, input_ids=IDS), _padded, _decode)


def run_model(name):
    """A family of two layers against eager: forward, padded, token by token."""
    expected = eager_logits(name)
    model = adapted(name)
    with torch.no_grad():
        for run, theirs in zip(RUNS, expected, strict=True):
            assert relative(run(model), theirs) <= 1e-5


def run_static():
    """A prompt in pieces into a static cache gives what one forward gives."""
    model = adapted("gpt_oss")
    with torch.no_grad():
        assert relative(_static(model), eager_logits("gpt_oss")[0]) <= 1e-5


def run_live():
    """A sink that is changed between two forwards, and its gradient."""
    model = small("gpt_oss")
    ids, sinks = IDS[:, :7], [layer.self_attn.sinks for layer in model.model.layers]

    def gradients():
        model.zero_grad()
        logits(model, input_ids=ids).square().mean().backward()
        return torch.stack([sink.grad for sink in sinks])

    theirs = gradients()
    adapter.adapt(model, "eager", recording=False)
    torch.testing.assert_close(gradients(), theirs, atol=1e-7, rtol=1e-4)
    set_sinks(model, mean=6.0)
    with torch.no_grad():
        ours = logits(model, input_ids=ids)
        adapter.restore(model)
        assert relative(ours, logits(model, input_ids=ids)) <= 1e-5


def run_replaced():
    """A sink that is another parameter after the first forward, with other values."""
    model = adapted("gpt_oss")
    with torch.no_grad():
        logits(model, input_ids=IDS)
        for layer in model.model.layers:
            layer.self_attn.sinks = torch.nn.Parameter(layer.self_attn.sinks + 3)
        ours = logits(model, input_ids=IDS)
        adapter.restore(model)
        assert relative(ours, logits(model, input_ids=IDS)) <= 1e-5


def run_narrowed():
    """The blocks of a call, one after the other, are the call."""
    for name, s in SITUATIONS.items():
        call, output = call_of(name), expected_of(name)[0]
        cuts = [(i, min(i + 3, s.q_length)) for i in range(0, s.q_length, 3)][:4]
        for start, stop in cuts:
            part = call.narrow(start, stop, 0, s.kv_length)
            close(registry.get("reference").attend(part).output, output[:, start:stop], name)


class Plain(torch.nn.Module):
    """An attention whose sink is cast on its way."""

    def __init__(self):
        super().__init__()
        self.sinks = torch.nn.Parameter(torch.tensor(SINKS))
        self.config = type("Config", (), {"_attn_implementation": "sinkhold"})()

    def forward(self, query, key, value):
        interface = ALL_ATTENTION_FUNCTIONS.get_interface("sinkhold", None)
        return interface(self, query, key, value, None, scaling=0.5, s_aux=self.sinks.to(query.dtype))


def run_findings():
    """What the source says about the sinks of three families and of a made-up module."""
    validate = AttentionFuser().validate
    per_head = validate(small("gpt_oss").model.layers[0].self_attn)
    assert (per_head.sink.kind, per_head.sink.source) == (SinkKind.PER_HEAD, "sinks")
    assert per_head.scaling.value == 0.25
    layers = small("mimo_v2_flash").model.layers
    assert validate(layers[0].self_attn).sink.kind is SinkKind.NONE
    assert validate(layers[1].self_attn).sink.kind is SinkKind.PER_HEAD
    inkling = small("inkling2").model.language_model.layers[0].self_attn
    assert validate(inkling).sink.kind is SinkKind.PER_TOKEN
    cast = validate(Plain())
    assert (cast.sink.source, bool(cast.sink.transforms)) == ("sinks", True)


def run_transformed():
    """A sink that is cast on its way passes; one with other values does not."""
    module, other, qkv = Plain().double(), Plain().double(), [torch.randn(1, 4, 3, 8)] * 3
    module(*qkv)
    attn = attach(other)
    must_raise(SinkError, sinkhold_attention, other, *qkv, scaling=0.5, s_aux=other.sinks.float() + 1)
    assert attn.sink_is_transformed


CHECKS = {
    **{f"{b}": functools.partial(run_backend, b) for b in ("reference", "eager", "sdpa")},
    **{f"{b} precision": functools.partial(run_precision, b) for b in ("reference", "eager", "sdpa")},
    **{f"{b} extremes": functools.partial(run_extremes, b) for b in ("reference", "eager", "sdpa")},
    **{f"model {n}": functools.partial(run_model, n) for n in ("gpt_oss", "mimo_v2_flash", "inkling2")},
    "guard": run_guard,
    "guard of other kinds": run_guard_of_other_kinds,
    "calls": run_calls,
    "masks": run_masks,
    "static": run_static,
    "live": run_live,
    "live copy": run_replaced,
    "narrowed": run_narrowed,
    "findings": run_findings,
    "transformed": run_transformed,
}
