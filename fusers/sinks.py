"""Which of the things called 'sink' a call passes."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from .base import NO_SINK, Argument, ClassFinding, SinkKind, SinkSpec, Status, TensorRef, Value
from .errors import RefusedError
from .flow import Bound, Choice, Flow, Opaque, Parameter, Reach
from .resolve import Resolver

SINK_KEYWORDS = ("s_aux", "sinks")

_OTHER_SINKS = re.compile(
    r"sink|softmax_(offset|off_by_one|one)|add_zero_attn|bias_[kv]\b"
    r"|(learn(ed|able)|null|static|register|dummy|extra)_(kv|k|v|keys?|values?)\b"
)
_SHAPE_ONLY = frozenset({"dtype", "device", "shape", "ndim", "size", "dim", "type"})


def is_other_sink(keyword: str) -> bool:
    """Whether a keyword is named like a sink and is none that the adapter implements."""
    return keyword not in SINK_KEYWORDS and _OTHER_SINKS.search(keyword) is not None


def is_computed(node: ast.expr, flow: Flow) -> bool:
    """Whether a call of a submodule on the forward's own arguments makes the value: a sink for each token."""
    return any(
        isinstance(inner, ast.Call) and _rooted_in_self(inner.func, flow) and _varies(inner, flow)
        for inner in _sources(node, flow)
    )


def sink_of(finding: ClassFinding, resolver: Resolver, flow: Flow, arguments: dict[str, Value]) -> SinkSpec:
    """The sink that a layer's calls pass.

    Raises:
        RefusedError: two sinks at once, or something that is no logit for each head.
    """
    given = [name for name in SINK_KEYWORDS if name in arguments and not _is_none(arguments[name])]
    if not given:
        return NO_SINK
    if all(_passed(finding, name) for name in SINK_KEYWORDS) and len(given) > 1:
        raise RefusedError("the call passes two sinks, s_aux and sinks", where=finding.where)
    shown = [name for name in given if _passed(finding, name)]
    if not shown:
        return SinkSpec(SinkKind.NONE, given[0], exact=False)
    name = shown[0]
    value, argument = arguments[name], _first(finding, name)
    text = _expanded(argument.node, flow)
    if value.status is Status.RESOLVED:
        return _per_head(name, text, value.value, finding)
    if value.reason.startswith("only some"):
        return SinkSpec(SinkKind.NONE, name, text, exact=False)
    if is_computed(argument.node, flow):
        return SinkSpec(SinkKind.PER_TOKEN, name, text, transforms=tuple(_methods(argument.node, flow)))
    return SinkSpec(SinkKind.NONE, name, text, exact=False)


def _is_none(value: Value) -> bool:
    return value.status is Status.RESOLVED and value.value is None


def _passed(finding: ClassFinding, name: str) -> bool:
    return any(call.argument(name) is not None for call in finding.calls)


def _first(finding: ClassFinding, name: str) -> Argument:
    return next(found for call in finding.calls if (found := call.argument(name)) is not None)


def _per_head(keyword: str, text: str, found: object, finding: ClassFinding) -> SinkSpec:
    if not isinstance(found, TensorRef):
        raise RefusedError(f"the sink {text} is {found!r}, not a tensor", where=finding.where)
    if sum(size > 1 for size in found.shape) > 1 and found.exact:
        what = f"the sink {text} has the shape {found.shape}, which is not one logit for each head"
        raise RefusedError(what, where=finding.where)
    return SinkSpec(
        SinkKind.PER_HEAD, keyword, text, found.path, found.shape, found.dtype, found.transforms, found.exact
    )


def _expanded(node: ast.expr, flow: Flow) -> str:
    if isinstance(node, ast.Name) and isinstance(reach := flow.reach(node.id, node), Bound):
        return _expanded(reach.expression, flow)
    return ast.unparse(node)


def _methods(node: ast.expr, flow: Flow) -> list[str]:
    """The methods applied to a computed value, the first applied first."""
    if isinstance(node, ast.Name) and isinstance(reach := flow.reach(node.id, node), Bound):
        return _methods(reach.expression, flow)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and not _rooted_in_self(node.func, flow):
        return [*_methods(node.func.value, flow), node.func.attr]
    return []


def _rooted_in_self(node: ast.expr, flow: Flow) -> bool:
    while isinstance(node, ast.Attribute):
        node = node.value
    if not isinstance(node, ast.Name):
        return False
    reach = flow.reach(node.id, node)
    return isinstance(reach, Parameter) and reach.first


def _sources(node: ast.expr, flow: Flow, seen: frozenset[ast.AST] = frozenset()) -> Iterator[ast.expr]:
    """The expressions that a value is made of, through locals; tests and reads of shapes and dtypes left out."""
    if node in seen:
        return
    seen = seen | {node}
    yield node
    if isinstance(node, ast.Attribute) and node.attr in _SHAPE_ONLY:
        return
    if isinstance(node, ast.Name):
        for bound in _bound(flow.reach(node.id, node)):
            yield from _sources(bound, flow, seen)
        return
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr) and not (isinstance(node, ast.IfExp) and child is node.test):
            yield from _sources(child, flow, seen)


def _bound(reach: Reach | None) -> Iterator[ast.expr]:
    if isinstance(reach, Bound):
        yield reach.expression
    elif isinstance(reach, Choice):
        yield from _bound(reach.then)
        yield from _bound(reach.otherwise)


def _varies(call: ast.Call, flow: Flow) -> bool:
    arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
    return any(_is_call_time(source, flow) for argument in arguments for source in _sources(argument, flow))


def _is_call_time(node: ast.expr, flow: Flow) -> bool:
    if not isinstance(node, ast.Name):
        return False
    reach = flow.reach(node.id, node)
    shape_only = isinstance(parent := flow.parent(node), ast.Attribute) and parent.attr in _SHAPE_ONLY
    return not shape_only and (isinstance(reach, Opaque) or (isinstance(reach, Parameter) and not reach.first))
