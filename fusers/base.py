"""What every fuser does, and the findings that it hands over."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

import torch
from torch import nn


class Outcome(str, Enum):
    """What reading a class's source came to."""

    NONE = "none"
    """the forward does not call the attention interface"""
    RESOLVED = "resolved"
    """every argument that changes the mathematics has a meaning that the source alone gives"""
    DYNAMIC = "dynamic"
    """some argument is known only when the model runs; the recording decides"""
    REFUSED = "refused"
    """the call has no meaning that the adapter implements"""


@dataclass(frozen=True)
class Argument:
    """One argument of an interface call.

    `name` is the keyword, or the interface's own parameter name for a positional argument.
    """

    name: str
    expression: str
    node: ast.expr = field(repr=False, compare=False)
    positional: bool = False


@dataclass(frozen=True)
class InterfaceCall:
    """One call of the attention interface inside a forward; `line` is the line in the file."""

    file: str
    line: int
    arguments: tuple[Argument, ...]
    forwards_kwargs: bool
    in_loop: bool

    def argument(self, name: str) -> Argument | None:
        """The argument called `name`, or None when the call does not pass it."""
        return next((a for a in self.arguments if a.name == name), None)


@dataclass(frozen=True)
class ClassFinding:
    """What the source of one attention class says. Shared by all its instances."""

    cls: type
    outcome: Outcome
    reason: str
    file: str
    line: int
    calls: tuple[InterfaceCall, ...]

    @property
    def where(self) -> str:
        """Class and place of its (first) interface call, as errors and reports print it."""
        line = self.calls[0].line if self.calls else self.line
        return f"{self.cls.__module__}.{self.cls.__qualname__} ({self.file}:{line})"


class SinkKind(str, Enum):
    """Which of the things called 'sink' a layer has."""

    NONE = "none"
    PER_HEAD = "per_head"
    """[num_heads]: a learned logit for each query head"""
    PER_TOKEN = "per_token"
    """[batch, num_heads, q_length, 1]: a logit for each query, computed in the forward"""


@dataclass(frozen=True)
class SinkSpec:
    """A layer's sink.

    `keyword` is the interface keyword that carries it (`s_aux` or `sinks`), `source` the dotted path of the parameter
    or buffer below the attention module (None when it is computed), `transforms` the operations between the two, by
    name. `exact` is False where they do more than reshape and cast: then the sink is not the parameter, and the
    recording decides.
    A sink that the source cannot tell has the kind NONE, `exact` False, and a DYNAMIC value under its keyword in the
    layer's arguments.
    """

    kind: SinkKind
    keyword: str | None = None
    expression: str | None = None
    source: str | None = None
    shape: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None
    transforms: tuple[str, ...] = ()
    exact: bool = True


NO_SINK = SinkSpec(SinkKind.NONE)


@dataclass(frozen=True)
class TensorRef:
    """A parameter or buffer by its path below the attention module. Findings hold no tensors, so none goes stale."""

    path: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    transforms: tuple[str, ...] = ()
    exact: bool = True


class Status(str, Enum):
    """How an expression's value is known."""

    RESOLVED = "resolved"
    DYNAMIC = "dynamic"
    ABSENT = "absent"
    """the call does not pass this argument"""


@dataclass(frozen=True)
class Value:
    """The value of one expression on one live module.

    `value` counts only when `status` is RESOLVED: None, a bool, a number, a string, a dtype, a tuple of these, or a
    TensorRef.
    """

    status: Status
    expression: str | None = None
    value: Any = None
    reason: str = ""


@dataclass(frozen=True)
class LayerFinding:
    """What one attention module passes to the interface: the class's finding, resolved on the live module.

    `arguments` holds every keyword of the calls except the tensors query, key, value and attention_mask. Where a
    forward holds several calls, an argument is resolved only if all calls agree on it. Where the source cannot show all
    that a call passes, `scaling`, `s_aux` and `sinks` are DYNAMIC unless the source shows them.
    """

    attention: ClassFinding
    scaling: Value
    sink: SinkSpec
    arguments: dict[str, Value] = field(default_factory=dict)


class Fuser(Protocol):
    """The three verbs of a fuser."""

    def match(self, cls: type[nn.Module]) -> Any:
        """Read the class once; cached. Never raises for a class that the fuser is not about."""

    def validate(self, module: nn.Module) -> Any:
        """Resolve the class's finding on one instance; raises a SinkholdError where it has no safe meaning."""

    def fuse(self, module: nn.Module) -> Any:
        """What replaces the module's part; changes nothing by itself."""
