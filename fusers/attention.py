"""AttentionFuser: what each attention class and each of its instances hands to the attention interface."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from types import CodeType
from weakref import WeakKeyDictionary

from torch import nn

from .base import (
    NO_SINK,
    ClassFinding,
    InterfaceCall,
    LayerFinding,
    Outcome,
    Status,
    Value,
)
from .errors import RefusedError, ResolveError, SourceError
from .flow import Flow
from .interface import find_calls, mentions_interface
from .outcome import ORDER_DIFFERS, classify
from .resolve import Resolver
from .sinks import SINK_KEYWORDS, sink_of
from .source import forward_function, read_function
from .values import is_number, same

_NO_SCALE = Value(Status.ABSENT, reason="no scale is passed, and the default differs between attention functions")
TENSORS = frozenset({"module", "query", "key", "value", "attention_mask"})


@dataclass(frozen=True)
class _Entry:
    """What is kept for a class. It must not reach the class itself, or the weak cache would never let it go."""

    code: CodeType | None
    outcome: Outcome
    reason: str
    file: str = ""
    line: int = 0
    calls: tuple[InterfaceCall, ...] = ()
    flow: Flow | None = None
    doubts: tuple[str, ...] = ()
    fault: tuple[str, str] | None = None

    def finding(self, cls: type) -> ClassFinding:
        return ClassFinding(cls, self.outcome, self.reason, self.file, self.line, self.calls)


class AttentionFuser:
    """Finds the attention interface's calls by reading source. Safe to use from several threads."""

    def __init__(self) -> None:
        self._entries: WeakKeyDictionary[type, _Entry] = WeakKeyDictionary()
        self._lock = threading.Lock()

    def match(self, cls: type[nn.Module]) -> ClassFinding:
        """What the source of `cls` says; read once, and again when its forward is replaced.

        A source that cannot be read makes a REFUSED finding, never NONE; `validate` raises the SourceError.
        """
        return self._entry(cls).finding(cls)

    def validate(self, module: nn.Module) -> LayerFinding:
        """The class's finding resolved on one instance.

        Raises:
            SourceError: the forward may call the interface and cannot be read.
            RefusedError: the call, or this instance's sink, has no meaning that the adapter implements.
            ResolveError: the scale is known and is not a finite number or None.
        """
        cls = type(module)
        entry = self._entry(cls)
        finding = entry.finding(cls)
        if entry.fault:
            raise SourceError(entry.fault[0], where=entry.fault[1])
        if entry.outcome is Outcome.REFUSED:
            raise RefusedError(entry.reason, where=finding.where)
        if entry.outcome is Outcome.NONE or entry.flow is None:
            return LayerFinding(finding, Value(Status.ABSENT), NO_SINK)
        resolver = Resolver(entry.flow, forward_function(cls), module)
        arguments = _hidden(entry) | {name: _agreed(name, entry.calls, resolver) for name in _names(entry.calls)}
        scaling = _checked_scale(arguments.get("scaling", _NO_SCALE), finding)
        sink = sink_of(finding, resolver, entry.flow, arguments)
        return LayerFinding(finding, scaling, sink, {**arguments, "scaling": scaling})

    def fuse(self, module: nn.Module) -> LayerFinding:
        """What the adapter replaces the module's attention by: the finding of `validate`. Changes nothing."""
        return self.validate(module)

    def _entry(self, cls: type) -> _Entry:
        try:
            code: CodeType | None = forward_function(cls).__code__
        except SourceError:
            code = None
        with self._lock:
            entry = self._entries.get(cls)
        if entry is None or entry.code is not code:
            entry = _read(cls, code)
            with self._lock:
                self._entries[cls] = entry
        return entry


def _read(cls: type, code: CodeType | None) -> _Entry:
    try:
        function = forward_function(cls)
        if not mentions_interface(function):
            return _Entry(code, Outcome.NONE, "the forward does not call the attention interface")
        source = read_function(function, f"{cls.__module__}.{cls.__qualname__}")
    except SourceError as error:
        return _Entry(code, Outcome.REFUSED, error.what, fault=(error.what, error.where))
    flow = Flow(source.tree)
    found = find_calls(source, function, flow)
    outcome, reason = classify(found, Resolver(flow, function, None), flow)
    return _Entry(code, outcome, reason, source.file, source.line, found.calls, flow, found.doubts)


def _names(calls: tuple[InterfaceCall, ...]) -> list[str]:
    named = [argument.name for call in calls for argument in call.arguments]
    return [name for name in dict.fromkeys(named) if name not in TENSORS]


def _hidden(entry: _Entry) -> dict[str, Value]:
    """What a call may pass unseen: each is DYNAMIC unless the source shows it."""
    if not entry.doubts:
        return {}
    return {name: Value(Status.DYNAMIC, reason=entry.doubts[0]) for name in ("scaling", *SINK_KEYWORDS)}


def _agreed(name: str, calls: tuple[InterfaceCall, ...], resolver: Resolver) -> Value:
    """The value that every call passes under `name`; DYNAMIC where they differ or some do not pass it."""
    given = [call.argument(name) for call in calls]
    values = [resolver.value(argument.node) for argument in given if argument is not None]
    first = values[0]
    if len(values) < len(given):
        return Value(Status.DYNAMIC, first.expression, reason="only some of the calls pass it")
    for value in values:
        if value.status is Status.DYNAMIC:
            return value
        if value.value is not first.value and not same(value.value, first.value):
            texts = " and ".join(dict.fromkeys(str(v.expression) for v in values))
            return Value(Status.DYNAMIC, first.expression, reason=f"the calls pass different values: {texts}")
    if any(argument is not None and argument.positional for argument in given):
        return Value(Status.DYNAMIC, first.expression, reason=ORDER_DIFFERS)
    return first


def _checked_scale(value: Value, finding: ClassFinding) -> Value:
    if value.status is not Status.RESOLVED or value.value is None:
        return value
    if hasattr(value.value, "path"):
        return Value(Status.DYNAMIC, value.expression, reason=f"the scale is the tensor {value.value.path!r}")
    number = value.value
    if not is_number(number) or isinstance(number, bool) or number != number or number in (float("inf"), -float("inf")):
        raise ResolveError(f"the scale {value.expression} is {number!r}, not a finite number", where=finding.where)
    return value
