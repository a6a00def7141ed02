"""Faults in how an interface call is handed to a backend."""

from __future__ import annotations

from .apply import faults

TRANSLATE = "adapter/translate.py"

MUTANTS = (
    *faults(
        TRANSLATE,
        "visibility=visibility, sinks=sink, bias=bias,",
        ["model gpt_oss"],
        {
            "dropped on the way": "visibility=visibility, sinks=None, bias=bias,",
            "dropped in decode only": ("visibility=visibility, sinks=sink if query.shape[2] > 1 else None, bias=bias,"),
            "dropped in prefill only": (
                "visibility=visibility, sinks=sink if query.shape[2] == 1 else None, bias=bias,"
            ),
            "dropped with a window only": (
                "visibility=visibility, sinks=sink if visibility.left is None else None, bias=bias,"
            ),
            "dropped with padding only": (
                "visibility=visibility, sinks=sink if visibility.padding is None else None, bias=bias,"
            ),
            "dropped without a window only": (
                "visibility=visibility, sinks=sink if visibility.left is not None else None, bias=bias,"
            ),
            "every layer gets the sink of the first": (
                "visibility=visibility, sinks=build_call.__dict__.setdefault('first', sink), bias=bias,"
            ),
        },
    ),
    *faults(
        TRANSLATE,
        "visibility=visibility, sinks=sink, bias=bias,",
        ["live copy"],
        {
            "a copy is kept from the first forward": (
                "visibility=visibility, sinks=attn.__dict__.setdefault('kept', sink), bias=bias,"
            ),
        },
    ),
    *faults(
        TRANSLATE,
        "visibility=visibility, sinks=sink, bias=bias,",
        ["live"],
        {
            "cut from the graph": ("visibility=visibility, sinks=None if sink is None else sink.detach(), bias=bias,"),
        },
    ),
    *faults(
        TRANSLATE,
        "if sink is not None and sink.dim() != 4:\n        sink = sink.reshape(-1)",
        ["model inkling2"],
        {
            "per token, taken for one of each head": (
                "if sink is not None:\n        sink = sink[0, :, 0, 0] if sink.dim() == 4 else sink.reshape(-1)"
            ),
        },
    ),
    *faults(
        TRANSLATE,
        "return query.shape[-1] ** -0.5, query",
        ["calls"],
        {
            "a missing scale is one": "return 1.0, query",
        },
    ),
    *faults(
        TRANSLATE,
        "return float(scaling), query",
        ["calls"],
        {
            "the call's scale is not used": "return query.shape[-1] ** -0.5, query",
        },
    ),
    *faults(
        TRANSLATE,
        "return full.with_(dense=mask), None",
        ["calls"],
        {
            "bool masks are inverted": "return full.with_(dense=~mask), None",
        },
    ),
    *faults(
        TRANSLATE,
        "return full.with_(dense=visible), mask.masked_fill(~visible, 0)",
        ["calls"],
        {
            "what a float mask adds is lost": "return full.with_(dense=visible), None",
            "what a float mask hides is seen": "return full, mask.masked_fill(~visible, 0)",
        },
    ),
    *faults(
        TRANSLATE,
        "if position_bias is not None:",
        ["calls"],
        {
            "the position bias is lost": "if False:",
        },
    ),
    *faults(
        TRANSLATE,
        'if kwargs.get("indices") is not None:',
        ["calls"],
        {
            "chosen indices are ignored": "if False:",
        },
    ),
    *faults(
        TRANSLATE,
        "if boundaries is not None and isinstance(boundaries, Tensor):",
        ["calls"],
        {
            "boundaries of packed documents are ignored": "if False:",
        },
    ),
    *faults(
        TRANSLATE,
        "positions, right=True)",
        ["calls"],
        {
            "boundaries are one key late": "positions, right=False)",
        },
    ),
    *faults(
        TRANSLATE,
        "position_ids.diff(dim=-1)",
        ["calls"],
        {
            "positions that restart are ignored": "position_ids.diff(dim=-1) * 0 + 1",
        },
    ),
    *faults(
        TRANSLATE,
        "jumps.cumsum(-1), (1, 0))",
        ["calls"],
        {
            "positions restart one token early": "jumps.cumsum(-1), (0, 1))",
        },
    ),
    *faults(
        TRANSLATE,
        ("if mask.packed is None or any(a is not b for a, b in zip(mask.packed[0], given, strict=True)):"),
        ["calls"],
        {
            "documents of an earlier call are kept": "if mask.packed is None:",
        },
    ),
    *faults(
        TRANSLATE,
        'causal = bool(kwargs.get("is_causal")) and q_length > 1',
        ["calls"],
        {
            "is_causal is ignored": "causal = False",
        },
    ),
    *faults(
        TRANSLATE,
        "left = window - 1 if",
        ["calls"],
        {
            "a window without a mask sees W + 1": "left = window if",
        },
    ),
)
