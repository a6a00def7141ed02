"""What the tests compare between one process and several: logits, tokens and bytes of a saved tiny model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import StaticCache

import adapter
from adapter.parallel import shards_of
from tests.families import FAMILIES, tokens

NEW_TOKENS = 32


def inputs() -> tuple[Tensor, Tensor]:
    """Two rows of 12 tokens, longer than every window, and a mask that pads the first row by three."""
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[0, :3] = 0
    return tokens(2, 12), mask


@torch.no_grad()
def measured(model: Any, name: str) -> dict[str, Tensor]:
    """Logits of prefill, padded prefill and decode, and what `generated` gives after padding with either cache."""
    family = FAMILIES[name]
    ids, mask = inputs()
    padded = model(input_ids=ids, attention_mask=mask).logits[mask.bool()]  # rows of padding itself mean nothing
    found = {"prefill": model(input_ids=ids).logits, "padded": padded}
    if not family.generates:
        return found
    prompt, rest = ids[:, :9], ids[:, 9:]
    cache = model(input_ids=prompt, use_cache=True).past_key_values
    steps = [model(input_ids=rest[:, i : i + 1], past_key_values=cache).logits for i in range(rest.shape[1])]
    found["decode"] = torch.cat(steps, dim=1)
    found |= generated(model, ids, mask)
    if family.static_cache:
        static = StaticCache(config=model.config.get_text_config(decoder=True), max_cache_len=48)
        found["static"] = model(input_ids=ids, past_key_values=static, use_cache=True).logits
        found |= generated(model, ids, mask, "static ", cache_implementation="static", disable_compile=True)
    return found


def generated(model: Any, ids: Tensor, mask: Tensor, prefix: str = "", **kwargs: Any) -> dict[str, Tensor]:
    """Greedy tokens [batch, length + NEW_TOKENS] and the logits [batch, NEW_TOKENS, vocabulary] they were chosen by."""
    kwargs = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": -1, **kwargs}
    output = model.generate(ids, attention_mask=mask, return_dict_in_generate=True, output_logits=True, **kwargs)
    return {f"{prefix}tokens": output.sequences, f"{prefix}steps": torch.stack(output.logits, dim=1)}


def measure_loaded(folders: dict[str, Path], **kwargs: Any) -> dict[str, dict[str, Any]]:
    """On a rank: load each family's folder through the adapter and measure it."""
    found: dict[str, dict[str, Any]] = {}
    for name, folder in folders.items():
        model = getattr(adapter, FAMILIES[name].auto).from_pretrained(str(folder), **(kwargs or {"tp_plan": "auto"}))
        layers = [m for m in model.modules() if isinstance(m, adapter.Attention)]
        found[name] = {
            "outputs": measured(model, name),
            "shards": shards_of(model),
            "sinks": [attn.sinks.detach().clone() for attn in layers if attn.sinks is not None],
        }
    return found
