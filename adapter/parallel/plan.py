"""Tensor-parallel plans: what AttentionFuser found turned into transformers' own rules."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from fusers.base import LayerFinding, SinkKind

from ..adapt import find_layers
from ..errors import ParallelError
from .heads import LayerHeads, heads_of
from .styles import kv_style, shards

LOCAL = "local_params"
_GROUPED = "grouped_gemm"


@dataclass(frozen=True)
class Plan:
    """The rules that a model lacks, and what limits the number of ranks.

    Args:
        rules: name in the model, layer numbers as `*` -> transformers' style; to be merged over the model's own plan.
        heads: the layers whose heads are split.
        replicated: the attention layers that every rank holds whole.
        experts: number of experts -> one parameter that holds them, where experts are distributed.
    """

    rules: dict[str, str]
    heads: tuple[LayerHeads, ...]
    replicated: tuple[str, ...]
    experts: dict[int, str] = field(default_factory=dict)
    expert_parallel: bool = False


def generic(name: str) -> str:
    """`name` with the layer numbers as transformers' plans write them."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def derive_plan(model: nn.Module, ranks: int, user: dict[str, str] | None = None, experts: bool | None = None) -> Plan:
    """Plan `model` over `ranks` ranks.

    Args:
        model: the model, on any device; meta is enough.
        ranks: number of tensor-parallel ranks.
        user: rules that stand above the model's own and the derived ones.
        experts: distribute the experts by the model's expert plan; None where no tensor rule splits them.

    Raises:
        ParallelError: heads, sinks or experts do not divide, or a plan splits the sinks and not the heads.
    """
    user = user or {}
    own = {**_plan_of(model, "tp_plan"), **user}
    layers = find_layers(model)
    found = {path: heads_of(model.get_submodule(path), path, finding) for path, finding in layers.items()}
    split = _split_layers(found, own)
    rules = _rules(split, own, ranks)
    plan_ep = _plan_of(model, "ep_plan")
    if experts is None:
        experts = bool(plan_ep) and not any(shards(own.get(name)) for name in plan_ep)
    counts = _expert_counts(model, plan_ep) if experts else {}
    plan = Plan({**rules, **user}, tuple(split), tuple(p for p in layers if found[p] not in split), counts, experts)
    merged = {**own, **plan.rules}
    _check_agreement(model, layers, found, merged)
    _check_sizes(model, layers, merged, plan, ranks)
    return plan


def _plan_of(model: nn.Module, name: str) -> dict[str, str]:
    plan: Any = getattr(model, name, None)
    return dict(plan) if isinstance(plan, dict) else {}


def _split_layers(found: dict[str, LayerHeads | None], own: dict[str, str]) -> list[LayerHeads]:
    """The layers to split; all that share a rule, or none of them."""
    whole = {generic(path) for path, heads in found.items() if heads is None}
    split = [heads for path, heads in found.items() if heads is not None and generic(path) not in whole]
    return [h for h in split if h.sink is not None or _is_split(h, own) or _has_split_sibling(h, split)]


def _is_split(heads: LayerHeads, plan: dict[str, str]) -> bool:
    return shards(plan.get(generic(heads.child(heads.projections.query))))


def _has_split_sibling(heads: LayerHeads, split: list[LayerHeads]) -> bool:
    return any(other.sink is not None and generic(other.path) == generic(heads.path) for other in split)


def _rules(split: list[LayerHeads], own: dict[str, str], ranks: int) -> dict[str, str]:
    rules: dict[str, str] = {}
    for heads in split:
        parts = heads.projections
        wanted = {heads.child(parts.query): "colwise", heads.child(parts.output): "rowwise"}
        for part, head_dim in ((parts.key, heads.head_dim), (parts.value, heads.v_head_dim)):
            same = [h for h in split if generic(h.path) == generic(heads.path)]
            whole = any(h.num_kv_heads % ranks for h in same)
            wanted[heads.child(part)] = kv_style(head_dim) if whole else "colwise"
        for name in parts.through:
            wanted[f"{heads.path}.{name}"] = "replicated_with_grad_allreduce"
        if heads.sink is not None:
            wanted |= {f"{heads.path}.{heads.sink}": "colwise", heads.path: LOCAL}
        for name, style in wanted.items():
            given = own.get(generic(name))
            if given is None or (given == "colwise" and style != "colwise"):
                rules[generic(name)] = style
    return rules


def _expert_counts(model: nn.Module, plan: dict[str, str]) -> dict[int, str]:
    named = {name: p for name, p in model.named_parameters() if plan.get(generic(name)) == _GROUPED}
    return {p.shape[0]: name for name, p in reversed(list(named.items()))}


def _check_agreement(
    model: nn.Module, layers: dict[str, LayerFinding], found: dict[str, LayerHeads | None], plan: dict[str, str]
) -> None:
    """Raise ParallelError for a plan that splits the sinks of a layer and not its heads, or the other way round."""
    for path, finding in layers.items():
        if finding.sink.kind is not SinkKind.PER_HEAD or not finding.sink.source:
            continue
        sinks = shards(plan.get(generic(f"{path}.{finding.sink.source}")))
        heads = found[path]
        queries = heads.projections.query if heads else _linears(model.get_submodule(path))
        split = any(shards(plan.get(generic(f"{path}.{name}"))) for name in queries)
        if sinks != split:
            what = "the sinks and not the heads" if sinks else "the heads and not the sinks"
            raise ParallelError(
                f"the plan splits {what} of {generic(path)}",
                where=finding.attention.where,
                fix="give the sinks and the query projection the style 'colwise', and the attention 'local_params'",
            )


def _linears(module: nn.Module) -> tuple[str, ...]:
    return tuple(name for name, child in module.named_modules() if isinstance(child, nn.Linear))


def _check_sizes(
    model: nn.Module, layers: dict[str, LayerFinding], merged: dict[str, str], plan: Plan, ranks: int
) -> None:
    counts = {h.path: h.num_heads for h in plan.heads}
    for path, finding in layers.items():
        source = finding.sink.source
        if source and finding.sink.kind is SinkKind.PER_HEAD and shards(merged.get(generic(f"{path}.{source}"))):
            counts[path] = model.get_submodule(path).get_parameter(source).numel()
    kv_counts = {h.path: h.num_kv_heads for h in plan.heads}
    packed = _packed_widths(model, merged)

    def obstacle(size: int) -> tuple[str, str] | None:
        for path, count in counts.items():
            if count % size:
                return f"{count} query heads (and their sinks) do not divide by {size} ranks", path
        for path, count in kv_counts.items():
            if count % size and size % count:
                return f"{count} key-value heads neither divide by {size} ranks nor the ranks by them", path
        for count, path in plan.experts.items():
            if count % size:
                return f"{count} experts do not divide by {size} ranks", path
        for width, path in packed.items():
            if width % size:
                return f"{width} features of each expert do not divide by {size} ranks", path
        return None

    found = obstacle(ranks)
    if found is not None:
        limit = max([1, *counts.values(), *plan.experts])
        works = ", ".join(str(n) for n in range(1, limit + 1) if obstacle(n) is None)
        raise ParallelError(
            found[0], where=found[1], why="a rank would hold a part of a head", fix=f"use one of these sizes: {works}"
        )


def _packed_widths(model: nn.Module, merged: dict[str, str]) -> dict[int, str]:
    named = {n: p for n, p in model.named_parameters() if merged.get(generic(n)) == "packed_colwise"}
    return {p.shape[-2] // 2: name for name, p in reversed(list(named.items())) if p.dim() > 1}
