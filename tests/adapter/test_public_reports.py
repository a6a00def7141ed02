"""Faults that users of other projects reported, seen through whole models; each is named by repository and number."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import adapter
from adapter.attention import Attention, registered_attention, sinkhold_attention
from adapter.errors import AdaptError, CallError, SinkError
from tests.adapter.comparison import decode, logits, new_cache, relative, under_adapter, under_eager
from tests.families import build, tokens

IDS = tokens(2, 21)
BACKENDS = ["reference", "eager", "sdpa"]


def forward(model):
    return logits(model, input_ids=IDS)


def drop_sinks(model):
    for layer in model.model.layers:
        if getattr(layer.self_attn, "sinks", None) is not None:
            layer.self_attn.sinks.data.fill_(float("-inf"))


@pytest.mark.parametrize("backend", BACKENDS)
def test_vllm_52156_granite_keeps_its_sinks(backend):
    """There s_aux vanished in **kwargs, and the attention objects stood outside the tree of modules."""
    model = build("granite_swa")
    exact = under_eager(build("granite_swa").double(), forward)
    assert relative(under_adapter(model, forward, backend).double(), exact) <= 1e-5
    with adapter.adapted(model, backend):
        assert sum(isinstance(m, Attention) for m in model.modules()) == 4
    drop_sinks(model)
    assert (under_adapter(model, forward, backend) - exact).abs().max() >= 0.1


def test_transformers_sdpa_takes_a_sink_and_drops_it():
    """The fault stands in transformers 5.24; under the adapter torch's fused op gives what eager gives."""
    model = build("gpt_oss", num_hidden_layers=1)
    module, q, kv = model.model.layers[0].self_attn, torch.randn(1, 4, 6, 16), torch.randn(1, 2, 6, 16)
    given = {"scaling": module.scaling, "sliding_window": module.sliding_window, "is_causal": True}
    dropped = sdpa_attention_forward(module, q, kv, kv, None, s_aux=module.sinks, **given)[0]
    assert torch.equal(dropped, sdpa_attention_forward(module, q, kv, kv, None, **given)[0])
    with adapter.adapted(model, "sdpa"), torch.no_grad():
        with pytest.raises(SinkError, match="the sink sinks is registered, but the call passes none"):
            sinkhold_attention(module, q, kv, kv, None, **given)
        ours = sinkhold_attention(module, q, kv, kv, None, s_aux=module.sinks, **given)[0]
    assert (ours - dropped).abs().max() > 0.1


class OneHead(torch.nn.Module):
    """The smallest attention with a sink."""

    def __init__(self):
        super().__init__()
        self.sinks = torch.nn.Parameter(torch.zeros(1))
        self.config = type("Config", (), {"_attn_implementation": "sinkhold"})()

    def forward(self, query, key, value):
        interface = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, None)
        return interface(self, query, key, value, None, scaling=1.0, s_aux=self.sinks)[0]


def test_torchtitan_4796_one_visible_key_through_a_whole_module():
    module = OneHead()
    q, k, v = (torch.full((1, 1, 1, 1), x, requires_grad=True) for x in (1.0, 1.0, 2.0))
    output = module(q, k, v)
    found = torch.autograd.grad(output.sum(), (q, k, v, module.sinks))
    assert output.item() == pytest.approx(1.46211716, abs=1e-6)
    assert [g.item() for g in found] == pytest.approx([0.39322387, 0.39322387, 0.73105858, -0.39322387], abs=1e-6)
    assert registered_attention(module) is not None


@pytest.mark.parametrize("backend", BACKENDS)
def test_flash_attention_1797_every_sink_gets_its_gradient(backend):
    """A row of padding beside it: what sees nothing gives nothing, and no NaN."""
    model, mask = build("gpt_oss", num_hidden_layers=2), torch.ones(2, 21, dtype=torch.long)
    mask[0, :8] = 0

    def gradients():
        model.zero_grad()
        logits(model, input_ids=IDS, attention_mask=mask)[mask.bool()].square().mean().backward()
        return torch.stack([layer.self_attn.sinks.grad for layer in model.model.layers])

    model.set_attn_implementation("eager")
    theirs = gradients()
    with adapter.adapted(model, backend):
        ours = gradients()
    assert theirs.abs().min() > 0
    assert relative(ours, theirs) <= 1e-4


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_vllm_52148_each_backend_and_phase_applies_the_sink(backend, phase):
    model = build("gpt_oss", num_hidden_layers=2)

    def run(m):
        return forward(m) if phase == "prefill" else decode(m, IDS, 1, new_cache(m, "dynamic", 32))[:, -1]

    theirs = under_eager(model, run)
    assert relative(under_adapter(model, run, backend), theirs) <= 1e-5
    with adapter.adapted(model, backend), torch.no_grad():
        cache = new_cache(model, "dynamic", 32)
        decode(model, IDS[:, :-1], 0, cache)
        if phase == "decode":
            drop_sinks(model)
            last = model(input_ids=IDS[:, -1:], past_key_values=cache, use_cache=True).logits[:, 0]
            assert (last - theirs).abs().max() >= 0.1
        else:
            drop_sinks(model)
            assert (forward(model) - theirs).abs().max() >= 0.1


def test_vllm_49815_a_bias_on_the_first_key_is_not_a_sink():
    """MiMo's vision tower adds its 'sink' to the logit of key 0: that key's value counts, the denominator stays."""
    model = build("mimo_v2_flash")
    with adapter.adapted(model), torch.no_grad():
        module = model.model.layers[0].self_attn
        assert registered_attention(module).sink_kind.value == "none"
        q, k, v = torch.randn(1, 4, 5, 24), torch.randn(1, 2, 5, 24), torch.randn(1, 2, 5, 16)
        bias = torch.zeros(1, 1, 5, 5)
        bias[..., 0] = 3.0
        output = sinkhold_attention(module, q, k, v, bias, scaling=module.scaling)[0]
    weights = (module.scaling * q @ k.repeat_interleave(2, 1).transpose(2, 3) + bias).softmax(-1)
    torch.testing.assert_close(output, (weights @ v.repeat_interleave(2, 1)).transpose(1, 2), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("chunk", [1, 7, 8, 9])
@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_sglang_11634_window_and_sink_at_the_edges_of_chunks(chunk, kind):
    """Chunks one shorter than the window of 8, as long, and one longer."""
    model = build("gpt_oss", num_hidden_layers=2)
    run = lambda m: decode(m, IDS, 0, new_cache(m, kind, 24), chunk=chunk)  # noqa: E731
    assert relative(under_adapter(model, run), under_eager(model, forward)) <= 1e-5


def test_unsloth_3142_a_block_mask_is_an_error():
    model = build("gpt_oss", num_hidden_layers=1)
    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 21, 21, device="cpu")
    with adapter.adapted(model), pytest.raises(CallError, match=r"the mask is a BlockMask.* which has no meaning here"):
        logits(model, input_ids=IDS, attention_mask={"full_attention": mask, "sliding_attention": mask})


@pytest.mark.parametrize("name", ["gpt_oss", "granite_swa"])
def test_unsloth_3982_left_padded_rows_generate_what_they_generate_alone(name):
    model, lengths = build(name, num_hidden_layers=4), (3, 17, 5)
    ids, mask = tokens(3, 17), torch.zeros(3, 17, dtype=torch.long)
    for row, n in enumerate(lengths):
        mask[row, 17 - n :] = 1
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "output_logits": True}

    def scores(rows, width):
        out = model.generate(
            input_ids=ids[rows, 17 - width :], attention_mask=mask[rows, 17 - width :], **options,
            return_dict_in_generate=True,
        )  # fmt: skip
        return torch.stack(out.logits, dim=1)

    with adapter.adapted(model), torch.no_grad():
        together = scores(slice(None), 17)
        for row, n in enumerate(lengths):
            assert relative(together[row], scores(slice(row, row + 1), n)[0]) <= 1e-5


def test_vllm_22678_each_layer_has_a_sink_or_none_of_its_own():
    """mimo_v2_flash: the first layer has none, so what it says does not hold for the others."""
    model = build("mimo_v2_flash")
    with_sink = [layer.path for layer in adapter.report(model).sink_layers]
    assert with_sink == ["model.layers.1.self_attn", "model.layers.2.self_attn"]
    theirs = under_eager(model, forward)
    drop_sinks(model)
    assert relative(under_adapter(model, forward), theirs) > 0.01


@pytest.mark.parametrize("name", ["gpt_oss", "granite_swa"])
def test_verl_3894_trainer_and_rollout_agree_in_bf16(name):
    """Log-probabilities of a full forward and of token-by-token decoding: no further apart than bf16 is from fp32."""
    model = build(name, torch.bfloat16, **({"num_experts_per_tok": 4} if name == "gpt_oss" else {}))

    def chosen(run):
        return lambda m: run(m)[:, :-1].float().log_softmax(-1).gather(-1, IDS[:, 1:, None])

    whole, steps = chosen(forward), chosen(lambda m: decode(m, IDS, 12, new_cache(m, "dynamic", 32)))
    apart = rms(under_adapter(model, whole), under_adapter(model, steps))
    theirs = under_eager(model, whole)
    assert apart <= rms(theirs, under_eager(model.float(), whole))


def rms(a, b):
    return (a - b).square().mean().sqrt().item()


@pytest.mark.parametrize("name", ["gpt_oss", "flint", "mimo_v2_flash"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_transformers_29623_a_window_of_w_tokens_counts_the_query(name, backend):
    """In one sliding layer the token seven back still shows at a window of 8, the one eight back does not."""
    model, other = build(name, num_hidden_layers=1, layer_types=["sliding_attention"]), IDS.clone()
    other[:, 5] = 99
    assert (IDS[:, 5] != 99).all()
    ours = under_adapter(model, forward, backend)
    moved = (ours - under_adapter(model, lambda m: logits(m, input_ids=other), backend)).abs().amax(dim=(0, 2)) > 0
    assert moved.nonzero().flatten().tolist() == list(range(5, 13))


def test_vllm_49795_the_window_is_the_layers_and_not_the_configs():
    model = build("gpt_oss", layer_types=["full_attention", "sliding_attention", "full_attention", "full_attention"])
    assert model.config.sliding_window == 8
    assert [layer.window for layer in adapter.report(model).layers] == [None, 8, None, None]
    assert relative(under_adapter(model, forward), under_eager(model, forward)) <= 1e-5


def test_vllm_48658_the_scale_of_latent_attention_is_that_of_its_query():
    """hy_v4's config has a head_dim of 16, its queries are 32 wide."""
    model = build("hy_v4")
    assert model.config.head_dim == 16
    assert {layer.scale for layer in adapter.report(model).layers} == {32**-0.5}


def test_continuous_batching_is_refused_and_not_left_to_drop_the_sink():
    """transformers 5.24 reads the sink off the module there, and fails inside its thread where a layer has none."""
    model = build("mimo_v2_flash")
    with adapter.adapted(model), pytest.raises((ValueError, AdaptError), match=r"not supported|on an adapted"):
        model.generate_batch([IDS[0].tolist()])
