"""Every sink family in pairwise combinations of dtype, geometry, mask, cache and size of sink, against eager."""

from __future__ import annotations

import functools
import re

import pytest
import torch
import transformers

import adapter
from tests.adapter.comparison import new_cache, relative, under_adapter, under_eager
from tests.families import FAMILIES, INSTALLED, build, tokens
from tests.pairwise import covering, pairs_of, possible

AXES = {
    "dtype": ("float32", "bfloat16", "float16"),
    "group": (1, 2, 4, 8),
    "window": ("none", "smaller", "equal", "larger"),
    "padding": ("none", "left", "right"),
    "queries": (1, 7, 64),
    "cache": ("none", "dynamic", "static"),
    "sink": ("-inf", "-10", "0", "+2", "+20", "1e4", "mixed"),
}
MIXED = (float("-inf"), -10.0, 0.0, 2.0, 20.0, 1e4)
PREFIX = 6
HEADS = {"mimo_v2_flash": 16}  # 8 elsewhere; its sliding layers have twice the kv heads of the others
MULTI_HEAD_LATENT = ("hy_v4", "hy_v4_vl")
COMPUTED = ("inkling2", "inkling2_loop")


def obstacle(name, row):
    """Why a family cannot express a combination; None when it can."""
    if row["padding"] != "none" and row["queries"] == 1 and row["cache"] == "none":
        return "one token without a cache leaves nothing to pad"
    if row["window"] == "smaller" and row["queries"] == 1 and row["cache"] == "none":
        return "no window is smaller than one token"
    if row["cache"] != "none" and not FAMILIES[name].generates:
        return "the family classifies tokens and keeps no cache"
    if row["cache"] == "static" and not FAMILIES[name].static_cache:
        return "transformers has no static cache for this family"
    if name in MULTI_HEAD_LATENT and row["group"] != 1:
        return "multi-head latent attention expands keys to every head"
    if name in MULTI_HEAD_LATENT and row["window"] != "none":
        return "every layer picks keys by an index and has no window"
    if name in ("openai_privacy_filter", "deepseek_v4") and row["window"] == "none":
        return "every layer has a window"
    if name == "mimo_v2_flash" and row["window"] == "none":
        return "layers without a window have no sink"
    return None


@functools.cache
def rows_of(name):
    return covering(possible(AXES, lambda row: obstacle(name, row)), at_least=24)


CELLS = [(name, tuple(row.values())) for name in INSTALLED for row in rows_of(name)]


def length_of(name, row):
    """Tokens in the cache before the last call, and in that call."""
    # deepseek_v4's compressor takes a prompt in one piece: longer queries are a prefill of an empty cache there.
    cached = row["cache"] != "none" and not (name == "deepseek_v4" and row["queries"] > 1)
    return (PREFIX if cached else 0), row["queries"]


def window_of(name, row):
    total = sum(length_of(name, row))
    return {"none": 8, "smaller": max(2, total // 3), "equal": total, "larger": total + 5}[row["window"]]


def overrides(name, row):
    """The fields of a model of two layers with the geometry of a row, in which every token goes to every expert."""
    count, window = HEADS.get(name, 8), window_of(name, row)
    heads = (row["group"], 1) if name == "deepseek_v4" else (count, count // row["group"])
    fields = {
        "num_hidden_layers": 2, "num_attention_heads": heads[0], "num_key_value_heads": heads[1],
        "sliding_window": window, "num_experts_per_tok": 4,
    }  # fmt: skip
    kinds = ["full_attention" if row["window"] == "none" else "sliding_attention", "full_attention"]
    if name in ("gpt_oss", "granite_swa", "granitemoe_swa", "flint", "mimo_v2_flash"):
        fields["layer_types"] = kinds
    if name == "granite_swa":
        fields["layer_rope_theta"] = [0, 10000.0]
    if name == "mimo_v2_flash":
        fields |= {"layer_types": kinds[::-1], "num_key_value_heads": heads[1] // 2}
    if name in MULTI_HEAD_LATENT:
        del fields["num_key_value_heads"], fields["sliding_window"]
    if name == "deepseek_v4":
        fields |= {
            "layer_types": ["compressed_sparse_attention", "heavily_compressed_attention"], "o_groups": 1,
            "mlp_layer_types": ["hash_moe", "moe"], "index_topk": 64,
        }  # fmt: skip
    if name in COMPUTED:
        del fields["sliding_window"]
        sliding = "hybrid" if row["window"] == "none" else "hybrid_sliding"
        fields |= {
            "swa_num_attention_heads": heads[0], "swa_num_key_value_heads": heads[1], "sliding_window_size": window,
            "layer_types": [sliding, "hybrid"],
        }  # fmt: skip
    if name == "inkling2_loop":
        fields |= {
            "num_hidden_layers": 3, "loop_layer_index_start": 1, "loop_layer_index_end": 2,
            "layer_types": [sliding, sliding, "hybrid"], "n_layers_per_attn_res_block": 1,
        }  # fmt: skip
    return fields


def set_level(model, level):
    """Every sink of the model at one level; where each token computes its own, what is computed is replaced."""
    for name, parameter in model.named_parameters():
        if name.endswith(".sinks"):
            parameter.data.copy_(values_of(level, parameter.numel()))
    for name, module in model.named_modules():
        if name.endswith("sink_proj"):
            module.register_forward_hook(
                lambda m, a, out: out * (level == "+2") + values_of(level, out.shape[-1]).to(out.dtype)
            )


def values_of(level, count):
    if level == "mixed":
        return torch.tensor(MIXED)[torch.arange(count) % len(MIXED)]
    return torch.full((count,), float(level))


def mask_of(name, row):
    """[2, tokens] of zeros where the first row is padded, or None."""
    prefix, queries = length_of(name, row)
    if row["padding"] == "none":
        return None
    mask = torch.ones(2, prefix + queries, dtype=torch.long)
    if row["padding"] == "left":
        mask[0, :3] = 0
    elif queries == 1:
        mask[0, prefix - 2 : prefix] = 0  # a prompt padded at its end, then one more token
    else:
        mask[0, -3:] = 0
    return mask


def forward(model, name, row, mask):
    """Logits of every token: a prefix into the cache and one call after it, or one call without a cache."""
    prefix, queries = length_of(name, row)
    ids = tokens(2, prefix + queries)
    positions = None if mask is None else mask.cumsum(-1).sub(1).clamp(min=0)
    with_cache = row["cache"] != "none"
    extra = {"past_key_values": new_cache(model, row["cache"], prefix + queries + 3)} if with_cache else {}
    if FAMILIES[name].generates:
        extra["use_cache"] = with_cache
    pieces = []
    for start, stop in [(0, prefix), (prefix, prefix + queries)][0 if prefix else 1 :]:
        if mask is not None:
            extra["attention_mask"] = mask[:, :stop]
        if mask is not None and FAMILIES[name].generates:
            extra["position_ids"] = positions[:, start:stop]
        pieces.append(model(input_ids=ids[:, start:stop], **extra).logits)
    return torch.cat(pieces, dim=1)


def cast(model, dtype):
    """The model as it is loaded in a dtype: what transformers keeps in fp32, sinks among it, stays so."""
    kept = [re.compile(rf"(^|\.){name}($|\.)") for name in model._keep_in_fp32_modules_strict or ()]
    for name, parameter in model.named_parameters():
        if not any(pattern.search(name) for pattern in kept):
            parameter.data = parameter.data.to(dtype)
    return model


def rms(a, b):
    return (a.double() - b.double()).square().mean().sqrt().item()


@pytest.mark.parametrize(("name", "values"), CELLS, ids=["-".join(map(str, (n, *v))) for n, v in CELLS])
def test_cell(name, values):
    row = dict(zip(AXES, values, strict=True))
    dtype, mask = getattr(torch, row["dtype"]), mask_of(name, row)
    model = cast(build(name, **overrides(name, row)), dtype)
    set_level(model, row["sink"])
    real = ... if mask is None else mask.bool()
    try:
        theirs = under_eager(model, lambda m: forward(m, name, row, mask))[real]
    except RuntimeError as error:
        if dtype is torch.float32:
            raise
        pytest.skip(f"eager of transformers {transformers.__version__} does not run in {row['dtype']}: {error}")
    with adapter.adapted(model, recording=False), torch.no_grad():
        ours = forward(model, name, row, mask)[real]
    assert ours.dtype is theirs.dtype
    assert ours.isfinite().all()
    if dtype is torch.float32:
        assert relative(ours, theirs) <= 1e-5
        return
    # The same weights in fp32 are exact enough to judge half precision, and transformers' eager is NaN in fp64 where
    # a padded token sees nothing. Over few logits the greatest error is a matter of luck, the mean square is not.
    exact = under_eager(model.float(), lambda m: forward(m, name, row, mask))[real]
    floor = torch.finfo(dtype).eps * exact.abs().max().item()
    assert rms(ours, exact) <= 2 * rms(theirs, exact) + floor


@pytest.mark.parametrize("name", INSTALLED)
@pytest.mark.parametrize("cache", ["none", "dynamic", "static"])
def test_a_dropped_sink_would_be_seen(name, cache):
    """The cells tell a sink from none: in prefill and in one step of decode, whatever the cache."""
    row = next((r for r in possible(AXES, lambda r: obstacle(name, r)) if _telling(r, cache)), None)
    if row is None:
        pytest.skip(obstacle(name, {**rows_of(name)[0], "cache": cache}))
    model = build(name, **overrides(name, row))
    set_level(model, "+2")
    given = under_adapter(model, lambda m: forward(m, name, row, None))
    set_level(model, "-inf")
    assert (given - under_adapter(model, lambda m: forward(m, name, row, None))).abs().max() >= 0.1


def _telling(row, cache):
    plain = row["dtype"] == "float32" and row["sink"] == "+2" and row["padding"] == "none"
    return plain and row["cache"] == cache and row["queries"] == (7 if cache == "none" else 1)


@pytest.mark.parametrize("name", INSTALLED)
def test_the_cells_hold_every_pair_that_the_family_can_express(name):
    rows = rows_of(name)
    expressible = set().union(*(pairs_of(r) for r in possible(AXES, lambda r: obstacle(name, r))))
    assert set().union(*(pairs_of(row) for row in rows)) == expressible
    assert len(rows) >= 24
    assert len({tuple(row.values()) for row in rows}) == len(rows)
    assert {row["sink"] for row in rows} == set(AXES["sink"])
