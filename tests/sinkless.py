"""Tiny-random models without sinks, one for each way of masking, scaling and capping that must not be disturbed."""

from __future__ import annotations

from typing import Any

import torch
import transformers

BASE = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "initializer_range": 0.3,
}  # fmt: skip
HYBRID = {"head_dim": 16, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}


def _gemma3() -> Any:
    text = {**BASE, **HYBRID, "query_pre_attn_scalar": 16}
    vision = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8,
        "patch_size": 4,
    }  # fmt: skip
    return transformers.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=120, boi_token_index=121,
        eoi_token_index=122,
    )  # fmt: skip


def _llama4() -> Any:
    return transformers.Llama4TextConfig(
        **BASE, intermediate_size_mlp=96, head_dim=16, attention_chunk_size=8, num_local_experts=2,
        num_experts_per_tok=1, no_rope_layers=[1, 0], interleave_moe_layer_step=1,
    )  # fmt: skip


def _t5() -> Any:
    return transformers.T5Config(
        vocab_size=128, d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4, relative_attention_num_buckets=8,
        decoder_start_token_id=0, initializer_factor=1.0,
    )  # fmt: skip


BUILDERS = {
    "llama": lambda: transformers.LlamaConfig(**BASE),
    "qwen3": lambda: transformers.Qwen3Config(**BASE, head_dim=16),
    "gemma2": lambda: transformers.Gemma2Config(
        **BASE, **HYBRID, query_pre_attn_scalar=16, attn_logit_softcapping=5.0, final_logit_softcapping=None
    ),
    "gemma3": _gemma3,
    "llama4": _llama4,
    "t5": _t5,
    "bert": lambda: transformers.BertConfig(
        vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        initializer_range=0.3,
    ),
}  # fmt: skip
AUTO = {
    "t5": "AutoModelForSeq2SeqLM",
    "bert": "AutoModelForTokenClassification",
    "gemma3": "AutoModelForImageTextToText",
}


def build(name: str) -> Any:
    """The tiny model, in eval mode."""
    torch.manual_seed(0)
    auto = getattr(transformers, AUTO.get(name, "AutoModelForCausalLM"))
    return auto.from_config(BUILDERS[name]()).eval()
