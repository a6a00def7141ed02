"""Train only the sinks of an adapted model: each gets a gradient, and the loss falls."""

from __future__ import annotations

import torch
import transformers

import adapter

STEPS = 20


def tiny_model() -> transformers.PreTrainedModel:
    """A gpt-oss of two layers with random weights and sinks of 0."""
    torch.manual_seed(0)
    config = transformers.GptOssConfig(
        vocab_size=128, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, sliding_window=8, num_local_experts=4, num_experts_per_tok=2,
        initializer_range=0.1, rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )  # fmt: skip
    model = transformers.GptOssForCausalLM(config)
    for layer in model.model.layers:
        layer.self_attn.sinks.data.zero_()
    return model


def main() -> None:
    model = tiny_model()
    adapter.adapt(model)
    sinks = {name: p for name, p in model.named_parameters() if name.endswith(".sinks")}
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for parameter in sinks.values():
        parameter.requires_grad_(True)

    optimizer = torch.optim.Adam(sinks.values(), lr=0.1)
    tokens = torch.randint(3, 128, (2, 24))
    losses = []
    for _ in range(STEPS):
        loss = model(input_ids=tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad is not None and p.grad.abs().max() > 0 for p in sinks.values()), "a sink got no gradient"
        optimizer.step()
        losses.append(loss.item())
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} in {STEPS} steps, by {len(sinks)} sink tensors alone")
    for name, parameter in sinks.items():
        print(f"  {name}: {[round(x, 2) for x in parameter.tolist()]}")
    assert losses[-1] < losses[0], "the loss did not fall"


if __name__ == "__main__":
    main()
