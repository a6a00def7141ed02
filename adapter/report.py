"""What was done to a model: as objects, as text and as JSON."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, replace
from pathlib import PurePath
from typing import Any

import torch
from torch import nn

from fusers.base import SinkKind, Status, Value

from .attention import Attention
from .backends import registry
from .backends.capability import Feature, Needs
from .shards import Shards, SinkShard, is_fsdp, shards_of, sink_shard


@dataclass(frozen=True)
class LayerReport:
    """One adapted layer. Expressions are the source's own; `where` is file:line of its interface call."""

    path: str
    cls: str
    where: str
    outcome: str
    scale_expression: str | None
    scale: Any
    sink_kind: str
    sink_expression: str | None
    sink_source: str | None
    sink_shape: tuple[int, ...] | None
    sink_dtype: str | None
    sink_device: str | None
    sink_shard: SinkShard | None
    """which of its sinks this rank holds; None where the model is not spread over ranks"""
    window_expression: str | None
    window: Any
    softcap: Any
    backends: dict[str, str]
    """phase ('prefill', 'decode') -> backend"""
    refusals: dict[str, list[str]]
    """backend -> why it was not taken"""
    measured: bool
    """True when `backends` is what ran, False when it is what would be chosen"""


@dataclass(frozen=True)
class Report:
    """Everything that adapt found and replaced. `print(report)` shows it, `to_json()` is for machines."""

    model: str
    backend: str
    recording: str
    layers: tuple[LayerReport, ...]
    shards: Shards | None = None
    """what this rank holds; None where the model is not spread over ranks"""

    @property
    def sink_layers(self) -> tuple[LayerReport, ...]:
        """The layers that have a sink."""
        return tuple(layer for layer in self.layers if layer.sink_kind != SinkKind.NONE.value)

    def to_dict(self) -> dict[str, Any]:
        """Plain types only; what a rank holds is there where the model is spread over ranks."""
        found = asdict(self)
        if self.shards is not None:
            found["shards"]["share"] = self.shards.share
            return found
        del found["shards"]
        for layer in found["layers"]:
            del layer["sink_shard"]
        return found

    def to_json(self) -> str:
        """The report as JSON text."""
        return json.dumps(self.to_dict(), indent=2, default=str)

    def __str__(self) -> str:
        if not self.layers:
            return f"{self.model}: nothing to do, no module calls the attention interface"
        counts = f"{len(self.layers)} attention layers, {len(self.sink_layers)} with a sink"
        head = f"{self.model}: {counts}, backend={self.backend!r}"
        lines = [head, f"  checked: {self.recording}"]
        if self.shards is not None:
            lines.append(f"  sharded: {self.shards}")
        for paths, layer in _grouped(self.layers):
            lines += [f"  {paths}", *(f"      {line}" for line in _describe(layer))]
        return "\n".join(lines)


def _describe(layer: LayerReport) -> list[str]:
    lines = [f"{layer.cls.rsplit('.', 1)[-1]} at {_short(layer.where)} ({layer.outcome})"]
    lines.append(f"scale    {layer.scale_expression or 'not passed'} -> {layer.scale}")
    if layer.sink_kind == SinkKind.NONE.value:
        lines.append("sink     none")
    else:
        lines.append(f"sink     {layer.sink_expression} -> {layer.sink_kind}, {_sink(layer)}")
    if layer.window_expression:
        lines.append(f"window   {layer.window_expression} -> {layer.window}")
    if layer.softcap is not None:
        lines.append(f"softcap  {layer.softcap}")
    verb = "ran" if layer.measured else "will run"
    chosen = ", ".join(f"{phase}: {name}" for phase, name in layer.backends.items()) or "chosen at the first call"
    lines.append(f"backend  {verb} {chosen}" if layer.backends else f"backend  {chosen}")
    return lines + _refused(layer.refusals)


def _sink(layer: LayerReport) -> str:
    if not layer.sink_shape:
        return "computed for each token"
    shard = layer.sink_shard
    shape = f"{list(layer.sink_shape)}" + (f" of [{shard.heads}]" if shard and shard.heads > shard.held else "")
    return f"{shape} {layer.sink_dtype} on {layer.sink_device}" + (f", {shard}" if shard else "")


def _refused(refusals: dict[str, list[str]]) -> list[str]:
    """One line for each backend that refused; those that are for another device together."""
    elsewhere = [name for name, reasons in refusals.items() if len(reasons) == 1 and reasons[0].startswith("device ")]
    lines = [f"         not {n}: {'; '.join(r)}" for n, r in refusals.items() if n not in elsewhere]
    return lines + ([f"         for another device: {', '.join(elsewhere)}"] if elsewhere else [])


def _short(where: str) -> str:
    file, _, line = where.rpartition(":")
    return f"{PurePath(file).name}:{line}"


def _grouped(layers: tuple[LayerReport, ...]) -> list[tuple[str, LayerReport]]:
    """Layers that differ in their number only, put together: `model.layers.{0,2}.self_attn`."""
    groups: dict[tuple[Any, ...], list[LayerReport]] = {}
    for layer in layers:
        key = json.dumps(asdict(replace(layer, path=_numberless(layer.path))), default=str, sort_keys=True)
        groups.setdefault((key,), []).append(layer)
    return [(_merged([m.path for m in members]), members[0]) for members in groups.values()]


def _numberless(path: str) -> str:
    return re.sub(r"\d+", "#", path)


def _merged(paths: list[str]) -> str:
    if len(paths) == 1:
        return paths[0]
    numbers = [re.findall(r"\d+", p) for p in paths]
    varying = [i for i in range(len(numbers[0])) if len({n[i] for n in numbers}) > 1]
    if len(varying) != 1:
        return ", ".join(paths)
    spread = "{" + ",".join(n[varying[0]] for n in numbers) + "}"
    counter = iter(range(len(numbers[0])))
    return re.sub(r"\d+", lambda m: spread if next(counter) == varying[0] else m.group(), paths[0])


def _shown(value: Value | None) -> Any:
    if value is None or value.status is Status.ABSENT:
        return None
    return value.value if value.status is Status.RESOLVED else f"at run time ({value.reason})"


def report_of(model: nn.Module, backend: str, recording: str) -> Report:
    """The report of an adapted model."""
    shards, fsdp = shards_of(model), is_fsdp(model)
    spread = shards if shards.split else None
    attached = [module for module in model.modules() if isinstance(module, Attention)]
    layers = tuple(_layer(attn, _shard(attn, fsdp) if spread else None) for attn in attached)
    return Report(f"{type(model).__module__}.{type(model).__qualname__}", backend, recording, layers, spread)


def _shard(attn: Attention, fsdp: bool) -> SinkShard | None:
    if attn.sink_kind is not SinkKind.PER_HEAD or attn._get_sink is None or attn.sinks is None:
        return None
    return sink_shard(attn._get_sink(attn.owner), fsdp=fsdp)


def _layer(attn: Attention, shard: SinkShard | None) -> LayerReport:
    finding, sink, sinks = attn.finding, attn.finding.sink, attn.sinks
    attention, arguments = finding.attention, attn.finding.arguments
    window, softcap = arguments.get("sliding_window"), arguments.get("softcap")
    chosen = dict(attn.chosen)
    backends = {_phase(needs): name for needs, name in chosen.items()}
    expected = [] if chosen else expected_needs(attn, shard.used if shard else None)
    refusals: dict[str, list[str]] = {}
    for needs in chosen or expected:
        reasons = registry.explain(needs)
        first = next((n for n, r in reasons.items() if not r), None) if attn.backend == registry.AUTO else attn.backend
        if first is not None and not chosen and not reasons.get(first):
            backends[_phase(needs)] = first
        for name, why in reasons.items():
            refusals.setdefault(name, []).extend(w for w in why if w not in refusals.get(name, []))
    scaling = finding.scaling
    return LayerReport(
        path=attn.path, cls=f"{attention.cls.__module__}.{attention.cls.__qualname__}",
        where=f"{attention.file}:{attention.calls[0].line if attention.calls else attention.line}",
        outcome=attention.outcome.value, scale_expression=scaling.expression, scale=_shown(scaling),
        sink_kind=sink.kind.value, sink_expression=sink.expression, sink_source=sink.source,
        sink_shape=tuple(sinks.shape) if sinks is not None else None,
        sink_dtype=str(sinks.dtype).removeprefix("torch.") if sinks is not None else None,
        sink_device=str(sinks.device) if sinks is not None else None, sink_shard=shard,
        window_expression=window.expression if window else None, window=_shown(window), softcap=_shown(softcap),
        backends=backends, refusals={n: r for n, r in refusals.items() if r}, measured=bool(chosen),
    )  # fmt: skip


def _phase(needs: Needs) -> str:
    return "decode" if needs.decode else "prefill"


def _integer(module: nn.Module, *names: str) -> int | None:
    for source in (module, getattr(module, "config", None)):
        for name in names:
            value = getattr(source, name, None)
            if isinstance(value, int) and value > 0:
                return value
    return None


def _execution_device(module: nn.Module, parameter: nn.Parameter) -> torch.device:
    """Where a parameter of `module` is in a forward: an offloaded one where accelerate's hook brings it."""
    if not parameter.is_meta:
        return parameter.device
    owner = next(m for m in module.modules() if any(p is parameter for p in m._parameters.values()))
    hook = getattr(owner, "_hf_hook", None)
    hooks = getattr(hook, "hooks", (hook,))  # accelerate's SequentialHook has several
    devices = (getattr(h, "execution_device", None) for h in hooks)
    return torch.device(next((d for d in devices if d is not None), "cpu"))


def expected_needs(attn: Attention, heads: int | None = None) -> list[Needs]:
    """What prefill and decode of a layer will need, read off its module before it ran; empty where it cannot tell.

    Args:
        heads: query heads of this rank's forward; None counts the sinks.
    """
    module, sinks = attn.owner, attn.sinks
    if heads is None:
        heads = sinks.numel() if sinks is not None else _integer(module, "num_heads", "num_attention_heads")
    head_dim = _integer(module, "qk_head_dim", "head_dim")
    parameter = next((p for p in module.parameters() if p.is_floating_point()), None)
    if not heads or head_dim is None or parameter is None:
        return []
    kv_heads = heads // (_integer(module, "num_key_value_groups") or 1)
    features = Feature.CAUSAL
    if attn.sink_kind is not SinkKind.NONE:
        features |= Feature.SINK_PER_HEAD if attn.sink_kind is SinkKind.PER_HEAD else Feature.SINK_PER_TOKEN
    if attn.registered.get("sliding_window") is not None:
        features |= Feature.WINDOW
    if attn.registered.get("softcap") is not None:
        features |= Feature.SOFTCAP
    if "position_bias" in attn.finding.arguments:
        features |= Feature.BIAS
    device = _execution_device(module, parameter)
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    v_head_dim = _integer(module, "v_head_dim") or head_dim
    return [
        Needs(
            device.type,
            capability,
            parameter.dtype,
            heads,
            max(kv_heads, 1),
            head_dim,
            v_head_dim,
            decode,
            features,
        )
        for decode in (False, True)
    ]
