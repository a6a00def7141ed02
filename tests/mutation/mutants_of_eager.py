"""Faults in the two backends of plain matrix products."""

from __future__ import annotations

from .apply import faults

EAGER = "adapter/backends/eager.py"
REFERENCE = "adapter/backends/reference.py"

MUTANTS = (
    *faults(
        EAGER,
        "if call.sinks is not None:",
        ["eager"],
        {
            "eager: the sink is dropped": "if False:",
            "eager: dropped in decode": "if call.sinks is not None and logits.shape[2] > 1:",
            "eager: dropped with a window": "if call.sinks is not None and call.visibility.left is None:",
            "eager: dropped with padding": "if call.sinks is not None and call.visibility.padding is None:",
            "eager: dropped where gradients are recorded": ("if call.sinks is not None and not logits.requires_grad:"),
        },
    ),
    *faults(
        EAGER,
        "[logits, sinks.to",
        ["eager"],
        {
            "eager: negated": "[logits, -sinks.to",
            "eager: multiplied by the scale": "[logits, call.scale * sinks.to",
            "eager: doubled": "[logits, 2 * sinks.to",
            "eager: shifted by one": "[logits, 1 + sinks.to",
            "eager: without its gradient": "[logits, sinks.detach().to",
            "eager: not before the soft cap": (
                "[logits, (sinks if call.softcap is None else call.softcap * torch.tanh(sinks / call.softcap)).to"
            ),
        },
    ),
    *faults(
        EAGER,
        "[logits, sinks.to",
        ["eager precision"],
        {
            "eager: rounded to bf16": "[logits, sinks.bfloat16().to",
        },
    ),
    *faults(
        EAGER,
        "call.sinks[:, None, None] if",
        ["eager"],
        {
            "eager: heads in reverse": "call.sinks.flip(0)[:, None, None] if",
            "eager: the first head's for all": "call.sinks[:1, None, None] if",
            "eager: the next head's": "call.sinks.roll(1)[:, None, None] if",
        },
    ),
    *faults(
        EAGER,
        "else call.sinks\n",
        ["eager"],
        {
            "eager: per token, queries and heads exchanged": (
                "else call.sinks.transpose(1, 2).reshape(call.sinks.shape)\n"
            ),
        },
    ),
    *faults(
        EAGER,
        "return weights.masked_fill(hidden, 0)",
        ["eager"],
        {
            "eager: in the maximum but not in the denominator": (
                "return (weights / weights.sum(3, keepdim=True)).masked_fill(hidden, 0)"
            ),
        },
    ),
    *faults(
        EAGER,
        "t.repeat_interleave(group, dim=1)",
        ["eager"],
        {
            "eager: query heads interleaved over kv heads": "t.repeat(1, group, 1, 1)",
        },
    ),
    *faults(
        EAGER,
        "if visible is not None:",
        ["eager"],
        {
            "eager: the mask is not applied": "if False:",
        },
    ),
    *faults(
        EAGER,
        "return weights.masked_fill(hidden, 0)",
        ["eager extremes"],
        {
            "eager: blind rows see every key": "return weights",
        },
    ),
    *faults(
        EAGER,
        "    if call.bias is not None:\n        logits = logits + call.bias.to(logits.dtype)\n",
        ["eager"],
        {
            "eager: soft cap after the bias": (
                "    if call.bias is not None:\n        logits = (call.softcap * torch.atanh((logits / "
                "call.softcap).clamp(-0.99999, 0.99999)) + call.bias) if call.softcap else logits + "
                "call.bias\n        logits = call.softcap * torch.tanh(logits / call.softcap) if "
                "call.softcap else logits\n"
            ),
        },
    ),
    *faults(
        REFERENCE,
        "if call.sinks is None:",
        ["reference"],
        {
            "reference: the sink is dropped": "if True:",
            "reference: dropped in decode": "if call.sinks is None or call.query.shape[2] == 1:",
        },
    ),
    *faults(
        REFERENCE,
        "return sinks.to(dtype)",
        ["reference"],
        {
            "reference: negated": "return -sinks.to(dtype)",
            "reference: without its gradient": "return sinks.detach().to(dtype)",
        },
    ),
    *faults(
        REFERENCE,
        "return sinks.to(dtype)",
        ["reference precision"],
        {
            "reference: rounded to the query's dtype": "return sinks.to(call.query.dtype).to(dtype)",
        },
    ),
    *faults(
        REFERENCE,
        "_sink_column(call, dtype)], dim=3))[..., :-1]",
        ["reference"],
        {
            "reference: the sink's value is not zero": "_sink_column(call, dtype)], dim=3))[..., 1:]",
        },
    ),
    *faults(
        REFERENCE,
        ".repeat_interleave(group, dim=1)",
        ["reference"],
        {
            "reference: query heads interleaved over kv heads": ".repeat(1, group, 1, 1)",
        },
    ),
    *faults(
        REFERENCE,
        'top.masked_fill(top == float("-inf"), 0)',
        ["reference extremes"],
        {
            "reference: the maximum without care for infinity": "top",
        },
    ),
)
