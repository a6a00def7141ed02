"""Adapt a model that is loaded already, compare it with itself, and get it back exactly as it was."""

from __future__ import annotations

import torch
import transformers

import adapter


def tiny_model() -> transformers.PreTrainedModel:
    """A Granite SWA of four layers with random weights and sinks around +3."""
    torch.manual_seed(0)
    config = transformers.GraniteSWAConfig(
        vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, sliding_window=8, attention_multiplier=0.25, initializer_range=0.3, bos_token_id=1,
        eos_token_id=2, layer_rope_theta=[0, 10000.0, 10000.0, 10000.0],
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for layer in model.model.layers:
        layer.self_attn.sinks.data.normal_(3.0, 0.5)
    return model


@torch.no_grad()
def logits(model: transformers.PreTrainedModel) -> torch.Tensor:
    """Of a fixed prompt of 24 tokens, [1, 24, vocab_size]."""
    return model(input_ids=torch.arange(3, 27)[None]).logits


def main() -> None:
    model = tiny_model()
    keys, before = list(model.state_dict()), logits(model)

    with adapter.adapted(model):
        inside = logits(model)
        assert list(model.state_dict()) == keys, "adapting adds nothing to the state dict"
    print(f"inside the block, off by {(inside - before).abs().max():.1e} of logits up to {before.abs().max():.0f}")
    assert torch.equal(logits(model), before), "after the block the model is what it was, bit by bit"

    report = adapter.adapt(model, backend="eager")
    print(f"{len(report.sink_layers)} layers with a sink, run by {report.layers[0].backends}")
    adapter.restore(model)
    assert torch.equal(logits(model), before)

    # No new call at all: after `import adapter`, transformers knows the name.
    model.set_attn_implementation("sinkhold")
    print(f"attn_implementation='sinkhold', off by {(logits(model) - before).abs().max():.1e}")


if __name__ == "__main__":
    main()
