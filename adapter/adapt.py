"""adapt, restore and adapted: put the Attention submodules in, take them out, leave nothing behind."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from fusers.base import LayerFinding, Outcome, SinkKind
from fusers.mask_writes import keeps_masks

from .attention import FUSER, NAMES, Attention, put, registered_attention
from .backends import registry
from .checkpoint import check_sink_values
from .errors import AdaptError, SinkholdError
from .interface import IMPLEMENTATION, register
from .pipeline import run_as_stage, stage_of
from .recording import record
from .report import Report, expected_needs, report_of

Model = TypeVar("Model", bound=nn.Module)

_STATE = "_sinkhold_adaptation"
_CLOSED = ("set_attn_implementation", "_supports_context_parallel")
_LOCK = threading.RLock()


@dataclass
class Adaptation:
    """What was changed on one model, so that it can be undone exactly."""

    backend: str
    implementations: list[tuple[PreTrainedConfig, Any]] = field(default_factory=list)
    recording: str = ""
    depth: int = 1
    release: Callable[[], None] | None = None


def find_layers(model: nn.Module) -> dict[str, LayerFinding]:
    """Path -> finding of every module of `model` whose forward calls the attention interface.

    Raises:
        SinkholdError: a source cannot be read, or a call has no meaning that the adapter implements.
    """
    found: dict[str, LayerFinding] = {}
    for path, module in model.named_modules():
        if type(module).__module__.startswith("torch.") or isinstance(module, Attention):
            continue
        if FUSER.match(type(module)).outcome is not Outcome.NONE:
            found[path] = _validated(path, module)
    return found


def _validated(path: str, module: nn.Module) -> LayerFinding:
    try:
        return FUSER.validate(module)
    except SinkholdError as error:
        error.where = f"{path}, {error.where}" if path else error.where
        raise


def adapt(model: nn.Module, backend: str = registry.AUTO, *, recording: bool | None = None) -> Report:
    """Run the attention of `model` through the adapter, in place.

    Args:
        model: any transformers model, on any device, sharded, offloaded or on meta.
        backend: 'auto', or the name of a backend that must run every layer.
        recording: run one forward of two tokens to compare what the source says with what the model passes. None does
            so where it is cheap; the first real forward is compared in any case.

    Returns:
        The report; `adapter.report(model)` gives it again.

    Raises:
        SinkholdError: the model has an attention that cannot be run correctly. The model is then as it was.
    """
    if not isinstance(model, nn.Module):
        raise AdaptError(f"{type(model).__name__} is no torch module", fix="pass a loaded model")
    if backend != registry.AUTO:
        registry.get(backend)
    with _LOCK:
        state: Adaptation | None = model.__dict__.get(_STATE)
        if state is not None:
            if backend not in (registry.AUTO, state.backend):
                raise AdaptError(
                    f"the model is adapted already, with backend {state.backend!r}",
                    fix="call adapter.restore(model) first",
                )
            state.depth += 1
            return report_of(model, state.backend, state.recording)
        undo: list[Callable[[], None]] = []
        try:
            return _adapt(model, backend, recording, undo)
        except BaseException:
            for step in reversed(undo):
                step()
            raise


def _adapt(model: nn.Module, backend: str, recording: bool | None, undo: list[Callable[[], None]]) -> Report:
    register()  # something may have taken the name, or its mask builder, away since the import
    layers = find_layers(model)
    state = Adaptation(backend)
    for path, finding in layers.items():
        module = model.get_submodule(path)
        attn = _put(module, finding, backend, path, undo)
        attn.mask_is_kept = all(keeps_masks(type(outer)) for outer in _around(model, path))
        sinks = attn.sinks
        if sinks is not None:
            check_sink_values([(f"{path}.{finding.sink.source}", sinks)])
        if backend != registry.AUTO and not any(p.is_meta for p in module.parameters()):
            for needs in expected_needs(attn):
                registry.select(backend, needs)
    for config in _configs(model, layers):
        previous = config._attn_implementation_internal
        undo.append(partial(_set_implementation, config, previous))
        state.implementations.append((config, previous))
        _set_implementation(config, IMPLEMENTATION)
    _close_detours(model, undo)
    if stage_of(model) is not None:
        state.release = run_as_stage(model)
        undo.append(state.release)
    model.__dict__[_STATE] = state
    undo.append(partial(_forget, model.__dict__, _STATE))
    state.recording = record(model, layers, recording)
    return report_of(model, backend, state.recording)


def _close_detours(model: nn.Module, undo: list[Callable[[], None]]) -> None:
    """While adapted, a model neither changes its attention under the adapter nor offers one that drops its sinks."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            closed: dict[str, Any] = {"set_attn_implementation": partial(_refuse_implementation, type(module).__name__)}
            if any(isinstance(m, Attention) and m.sink_kind is not SinkKind.NONE for m in module.modules()):
                # transformers runs context parallelism through an attention that knows no sinks.
                closed["_supports_context_parallel"] = False
            for name, value in closed.items():
                undo.append(partial(_forget, module.__dict__, name))
                module.__dict__[name] = value


def _refuse_implementation(name: str, attn_implementation: Any, *args: Any, **kwargs: Any) -> None:
    if attn_implementation != IMPLEMENTATION:
        raise AdaptError(
            f"set_attn_implementation({attn_implementation!r}) on an adapted {name}",
            why="the model would run past the adapter, and its sinks with it",
            fix="call adapter.restore(model) first",
        )


def _put(
    module: nn.Module, finding: LayerFinding, backend: str, path: str, undo: list[Callable[[], None]]
) -> Attention:
    existing = registered_attention(module)
    if existing is not None:
        # Attached at a first call under attn_implementation="sinkhold"; it becomes this adaptation's.
        before = (existing.backend, existing.path)
        undo.append(lambda: existing.__dict__.update(backend=before[0], path=before[1]))
        existing.backend, existing.path = backend, path
        return existing
    added = put(module, finding, backend, path)
    if added is None:
        raise AdaptError(f"both {' and '.join(NAMES)} are taken", where=f"{path}, {finding.attention.where}")
    name, attn = added
    undo.append(partial(_forget, module._modules, name))
    return attn


def _forget(names: dict[str, Any], name: str) -> None:
    names.pop(name, None)


def _set_implementation(config: PreTrainedConfig, implementation: Any) -> None:
    # The public setter also changes every sub-config; each is set, and set back, by itself here.
    config._attn_implementation_internal = implementation


def _around(model: nn.Module, path: str) -> Iterator[nn.Module]:
    """The modules from `model` down to the one at `path`; containers have no forward of their own and are left out."""
    parts = path.split(".") if path else []
    for depth in range(len(parts) + 1):
        module = model.get_submodule(".".join(parts[:depth]))
        if not isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            yield module


def _configs(model: nn.Module, layers: dict[str, LayerFinding]) -> list[PreTrainedConfig]:
    """Each config that an adapted layer, or a model around one, reads its implementation from."""
    found: dict[int, PreTrainedConfig] = {}
    for path in layers:
        for module in _around(model, path):
            config = getattr(module, "config", None)
            if isinstance(config, PreTrainedConfig):
                found[id(config)] = config
    return list(found.values())


def restore(model: Model) -> Model:
    """Give back exactly the model that was adapted; a model that is not adapted is returned as it is.

    Nested adaptations are undone one at a time.
    """
    with _LOCK:
        state: Adaptation | None = model.__dict__.get(_STATE)
        if state is None:
            return model
        state.depth -= 1
        if state.depth:
            return model
        for config, previous in state.implementations:
            _set_implementation(config, previous)
        if state.release is not None:
            state.release()
        for module in list(model.modules()):
            for name in NAMES:
                if isinstance(module._modules.get(name), Attention):
                    del module._modules[name]
            for name in _CLOSED:
                module.__dict__.pop(name, None)
        del model.__dict__[_STATE]
        return model


@contextmanager
def adapted(model: Model, backend: str = registry.AUTO, *, recording: bool | None = None) -> Iterator[Model]:
    """The model adapted inside the block and restored after it, whatever happens inside."""
    adapt(model, backend, recording=recording)
    try:
        yield model
    finally:
        restore(model)


def is_adapted(model: nn.Module) -> bool:
    """True between adapt and the last restore."""
    return _STATE in model.__dict__


def report(model: nn.Module) -> Report:
    """What was found in `model`, what replaced it, which backend runs it and why not the others.

    For a model that is not adapted it says what adapting would find.
    """
    state: Adaptation | None = model.__dict__.get(_STATE)
    if state is None:
        with adapted(model, recording=False):
            return report_of(model, registry.AUTO, "not adapted: this is what adapting finds")
    return report_of(model, state.backend, state.recording)
