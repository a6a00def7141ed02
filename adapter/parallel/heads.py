"""How the heads of one attention layer lie in its projections."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from fusers.base import LayerFinding, SinkKind
from fusers.projections import Projections, find_projections


@dataclass(frozen=True)
class LayerHeads:
    """A layer whose heads can be split: head h is rows [h * head_dim, (h + 1) * head_dim) of its query projection.

    Args:
        path: dotted path of the attention module in the model.
        projections: one linear each for query, key, value and output.
        sink: name of the per-head sink parameter of the module, or None.
    """

    path: str
    projections: Projections
    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    sink: str | None

    def child(self, part: tuple[str, ...]) -> str:
        """The path in the model of the only member of one of the projections."""
        return f"{self.path}.{part[0]}"


def heads_of(module: nn.Module, path: str, finding: LayerFinding) -> LayerHeads | None:
    """The heads of one attention module, or None where they cannot be split by its linear children alone."""
    found = find_projections(module, finding.attention)
    if found is None or not found.is_plain or finding.sink.kind is SinkKind.PER_TOKEN:
        return None
    parts = (found.query, found.key, found.value, found.output)
    linears = [module.get_submodule(part[0]) for part in parts]
    if any(type(linear) is not nn.Linear for linear in linears):
        return None
    query, key, value, output = (linear for linear in linears if isinstance(linear, nn.Linear))
    num_heads = head_count(module, finding)
    if not num_heads or query.out_features % num_heads:
        return None
    head_dim = query.out_features // num_heads
    num_kv_heads = key.out_features // head_dim
    if key.out_features % head_dim or num_heads % num_kv_heads or value.out_features % num_kv_heads:
        return None
    v_head_dim = value.out_features // num_kv_heads
    between = [p for name in found.through for p in module.get_submodule(name).parameters()]
    if output.in_features != num_heads * v_head_dim or any(p.numel() not in (head_dim, v_head_dim) for p in between):
        return None
    source = finding.sink.source if finding.sink.kind is SinkKind.PER_HEAD else None
    if source is not None and "." in source:
        return None  # transformers makes only a module's own parameters local for its forward
    return LayerHeads(path, found, num_heads, num_kv_heads, head_dim, v_head_dim, source)


def head_count(module: nn.Module, finding: LayerFinding) -> int | None:
    """The query heads: as many as there are sinks, or what the module or its config says where it has none."""
    if finding.sink.kind is SinkKind.PER_HEAD and finding.sink.source:
        sinks = module.get_parameter(finding.sink.source)
        return sinks.numel()
    for owner in (module, getattr(module, "config", None)):
        for name in ("num_heads", "num_attention_heads"):
            count = getattr(owner, name, None)
            if isinstance(count, int) and count > 0:
                return count
    return None
