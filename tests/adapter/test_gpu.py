"""Every installed family on the GPU: half precision held to eager's own error, tokens and logits in fp32."""

from __future__ import annotations

import copy

import pytest
import torch

import adapter
from tests.adapter.comparison import logits, relative, under_adapter, under_eager
from tests.families import GENERATING, INSTALLED, build, tokens

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", INSTALLED)
@pytest.mark.parametrize("padded", [False, True])
def test_half_precision_is_as_exact_as_eager(name, padded):
    model = build(name).cuda()
    ids = tokens(2, 40).cuda()
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :9] = 0
    inputs = {"input_ids": ids, "attention_mask": mask}
    real = mask.bool()
    exact = under_eager(model, lambda m: logits(m, **inputs))[real]
    half = copy.deepcopy(model).to(torch.bfloat16)
    theirs = (under_eager(half, lambda m: logits(m, **inputs))[real].float() - exact).pow(2).mean().sqrt()
    ours = (under_adapter(half, lambda m: logits(m, **inputs))[real].float() - exact).pow(2).mean().sqrt()
    assert ours <= 2 * theirs + 1e-3 * exact.abs().max()


@pytest.mark.parametrize("name", GENERATING)
def test_64_greedy_steps_in_fp32(name):
    model, ids = build(name).cuda(), tokens(2, 20).cuda()

    def run(m):
        out = m.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=64, min_new_tokens=64, do_sample=False,
            output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
        return torch.stack(out.logits, dim=1)

    theirs = under_eager(model, run)
    ours = under_adapter(model, run)
    assert ours.argmax(-1).tolist() == theirs.argmax(-1).tolist()
    assert relative(ours, theirs) <= 1e-3


def test_verify_passes_and_says_which_backend_ran():
    model = build("gpt_oss").cuda().to(torch.bfloat16)
    report = adapter.adapt(model)
    assert "triton" in {name for layer in report.layers for name in layer.backends.values()}
    assert adapter.verify(model).ok, str(adapter.verify(model))
