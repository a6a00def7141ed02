"""What the adapter costs besides attention: adapting 24 layers on the meta device, and the guard in each layer.

    python benchmarks/overhead.py [--json FILE]

Exits 1 when adapting takes 1 s or more, or the guard 5 microseconds or more.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import timeit
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GptOssConfig

import adapter
from adapter.guard import check_call, check_heads, check_sinks

ADAPT_LIMIT_S, GUARD_LIMIT_US = 1.0, 5.0


def meta_model(layers: int = 24) -> torch.nn.Module:
    """The gpt-oss-20b geometry without weights."""
    config = GptOssConfig(num_hidden_layers=layers)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def adapt_seconds(model: torch.nn.Module) -> float:
    """Seconds of one adapt, sources not yet read."""
    start = time.perf_counter()
    adapter.adapt(model)
    return time.perf_counter() - start


def guard_microseconds(model: torch.nn.Module, repeats: int = 200, number: int = 500) -> float:
    """The fastest of many short runs of the three checks with a real call's keywords; other work only adds time."""
    module = model.get_submodule("model.layers.0.self_attn")
    attn = module.attn
    query = torch.empty(1, attn.sinks.numel(), 1, 64, device="meta")
    kwargs = {
        "dropout": 0.0, "scaling": attn.registered["scaling"], "sliding_window": attn.registered["sliding_window"],
        "s_aux": module.sinks, "position_ids": torch.zeros(1, 1), "use_cache": True, "output_router_logits": False,
    }  # fmt: skip

    def guard() -> None:
        check_sinks(module, attn, kwargs["s_aux"])
        check_heads(module, attn, query, kwargs["s_aux"])
        check_call(module, attn, kwargs)

    return min(timeit.repeat(guard, repeat=repeats, number=number)) / number * 1e6


def main() -> int:
    """Measure, print and judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    model = meta_model()
    rows = {"adapt_24_layers_s": adapt_seconds(model), "guard_per_layer_us": guard_microseconds(model)}
    print(f"adapt, 24 layers on meta   {rows['adapt_24_layers_s']:.3f} s   (limit {ADAPT_LIMIT_S})")
    print(f"guard, a layer and forward {rows['guard_per_layer_us']:.2f} us  (limit {GUARD_LIMIT_US})")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2))
    return int(rows["adapt_24_layers_s"] >= ADAPT_LIMIT_S or rows["guard_per_layer_us"] >= GUARD_LIMIT_US)


if __name__ == "__main__":
    sys.exit(main())
