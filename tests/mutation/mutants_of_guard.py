"""Faults in what the source says of a sink, and in the guard that holds the call to it."""

from __future__ import annotations

from .apply import faults

GUARD = "adapter/guard.py"
ATTENTION = "adapter/attention.py"
SINKS = "fusers/sinks.py"

MUTANTS = (
    *faults(
        GUARD,
        "    kind = attn.sink_kind\n",
        ["guard"],
        {
            "the guard of sinks returns early": "    return\n",
        },
    ),
    *faults(
        GUARD,
        '    if s_aux is None:\n        raise SinkError(\n            f"the sink',
        ["guard"],
        {
            "a missing sink passes": (
                '    if s_aux is None:\n        return\n        raise SinkError(\n            f"the sink'
            ),
        },
    ),
    *faults(
        GUARD,
        (
            "return a.untyped_storage()._cdata == b.untyped_storage()._cdata and a.storage_offset() == "
            "b.storage_offset()"
        ),
        ["guard"],
        {
            "any tensor of the right size passes": "return True",
        },
    ),
    *faults(
        GUARD,
        "if s_aux.numel() != registered.numel():",
        ["guard"],
        {
            "a part of the sink passes": "if False:",
        },
    ),
    *faults(
        GUARD,
        "if heads != query.shape[1]:",
        ["guard"],
        {
            "sinks of other heads pass": "if False:",
        },
    ),
    *faults(
        GUARD,
        "heads = s_aux.numel() if s_aux.dim() != 4 else s_aux.shape[1]",
        ["guard of other kinds"],
        {
            "per-token sinks of other heads pass": ("heads = s_aux.numel() if s_aux.dim() != 4 else query.shape[1]"),
        },
    ),
    *faults(
        GUARD,
        "if name not in _KNOWN and value is not None:",
        ["guard"],
        {
            "a keyword that nobody applies passes": "if False:",
        },
    ),
    *faults(
        GUARD,
        "if name in kwargs and kwargs[name] != registered:",
        ["guard"],
        {
            "another scale or window passes": "if False:",
        },
    ),
    *faults(
        GUARD,
        "    elif kind is SinkKind.PER_TOKEN:\n        if s_aux is None:",
        ["guard of other kinds"],
        {
            "a missing per-token sink passes": (
                "    elif kind is SinkKind.PER_TOKEN:\n        if s_aux is None:\n            return\n      "
                "  if s_aux is None:"
            ),
        },
    ),
    *faults(
        GUARD,
        "if s_aux.dim() != 4 or s_aux.shape[-1] != 1:",
        ["guard of other kinds"],
        {
            "a per-token sink of any shape passes": "if False:",
        },
    ),
    *faults(
        GUARD,
        "elif s_aux is not None:",
        ["guard of other kinds"],
        {
            "a sink for a layer that has none passes": "elif False:",
        },
    ),
    *faults(
        ATTENTION,
        "        check_sinks(module, self, sink)\n",
        ["guard"],
        {
            "the guard is not called": "",
        },
    ),
    *faults(
        ATTENTION,
        "            if sink is not None:\n                raise",
        ["guard"],
        {
            "two sinks in one call pass": "            if False:\n                raise",
        },
    ),
    *faults(
        ATTENTION,
        'if kwargs.get("sinks") is not None:',
        ["model inkling2"],
        {
            "a sink called sinks= is overlooked": "if False:",
        },
    ),
    *faults(
        ATTENTION,
        "if registered is None or sink.numel() != registered.numel():",
        ["transformed"],
        {
            "the values of a cast sink are not compared": "if True:",
        },
    ),
    *faults(
        SINKS,
        "    if not given:\n",
        ["findings"],
        {
            "fusers: no sink is ever found": "    if True:\n",
        },
    ),
    *faults(
        SINKS,
        "if is_computed(argument.node, flow):",
        ["findings"],
        {
            "fusers: what is computed is not seen": "if False:",
        },
    ),
    *faults(
        SINKS,
        "found.dtype, found.transforms, found.exact",
        ["findings", "transformed"],
        {
            "fusers: a cast goes unnoticed": "found.dtype, (), found.exact",
        },
    ),
    *faults(
        SINKS,
        "return value.status is Status.RESOLVED and value.value is None",
        ["findings"],
        {
            "fusers: None is taken for a sink": "return False",
        },
    ),
)
