"""Load a checkpoint with sinks through the adapter, say what was found, generate, and prove it.

With a real checkpoint, only the line with `from_pretrained` is needed; here a tiny random one is made first, offline.
"""

from __future__ import annotations

import tempfile

import torch
import transformers

import adapter
from adapter import AutoModelForCausalLM
from adapter.verify import verify


def write_tiny_checkpoint(folder: str) -> None:
    """A gpt-oss of four layers with random weights and sinks around +3."""
    torch.manual_seed(0)
    config = transformers.GptOssConfig(
        vocab_size=128, hidden_size=64, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, sliding_window=8, num_local_experts=4, num_experts_per_tok=2,
        initializer_range=0.3, pad_token_id=0, eos_token_id=2,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )  # fmt: skip
    model = transformers.GptOssForCausalLM(config)
    for layer in model.model.layers:
        layer.self_attn.sinks.data.normal_(3.0, 0.5)
    model.save_pretrained(folder)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_tiny_checkpoint(folder)
        model = AutoModelForCausalLM.from_pretrained(folder)
    prompt = torch.arange(3, 27)[None]
    made = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, do_sample=False)
    print("generated:", made[0, prompt.shape[1] :].tolist())
    print(adapter.report(model))
    verification = verify(model)
    print(verification)
    if not verification.ok:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
