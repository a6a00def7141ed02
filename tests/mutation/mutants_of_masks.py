"""Faults in what a query may see."""

from __future__ import annotations

from .apply import faults

CALL = "adapter/backends/call.py"
MASKS = "adapter/masks.py"
FUNCTIONS = "adapter/mask_functions.py"

MUTANTS = (
    *faults(
        CALL,
        "(q - k <= self.left)",
        ["reference"],
        {
            "a window of W sees W + 1": "(q - k <= self.left + 1)",
            "a window of W sees W - 1": "(q - k < self.left)",
        },
    ),
    *faults(
        CALL,
        "(k - q <= self.right)",
        ["reference"],
        {
            "a query sees the next key": "(k - q <= self.right + 1)",
            "a query does not see itself": "(k - q < self.right)",
        },
    ),
    *faults(
        CALL,
        "visible = visible & self.padding.to(device)[:, None, None, :]",
        ["reference"],
        {
            "padding is seen": "pass",
        },
    ),
    *faults(
        CALL,
        "visible & (queries.to(device)[:, None, :, None] ==",
        ["reference"],
        {
            "documents see each other": "visible | (queries.to(device)[:, None, :, None] ==",
        },
    ),
    *faults(
        CALL,
        "device=device)[:, None] + self.q_offset",
        ["reference"],
        {
            "the first query always stands at zero": "device=device)[:, None]",
        },
    ),
    *faults(
        CALL,
        "device=device)[None, :] + self.kv_offset",
        ["reference"],
        {
            "the first key always stands at zero": "device=device)[None, :]",
        },
    ),
    *faults(
        CALL,
        "start = 0 if self.chunk_start is None else",
        ["reference"],
        {
            "chunks begin at the padding": "start = 0 if True else",
        },
    ),
    *faults(
        CALL,
        "visible = visible & self.dense.to(device)",
        ["reference"],
        {
            "a dense mask is forgotten": "pass",
        },
    ),
    *faults(
        CALL,
        "*(first - d for d in reach)",
        ["eager"],
        {
            "the first key of a window is cut off": "*(first - d + 1 for d in reach)",
        },
    ),
    *faults(
        CALL,
        "*(last + d + 1 for d in reach)",
        ["eager"],
        {
            "the last key of a range is cut off": "*(last + d for d in reach)",
        },
    ),
    *faults(
        CALL,
        "sinks[:, :, q_start:q_stop]",
        ["eager", "sdpa", "narrowed"],
        {
            "a later block gets the first queries' sinks": "sinks[:, :, : q_stop - q_start]",
        },
    ),
    *faults(
        CALL,
        "q_offset=self.q_offset + q_start",
        ["sdpa"],
        {
            "a later block stands where the first does": "q_offset=self.q_offset",
        },
    ),
    *faults(
        CALL,
        "kv_offset=self.kv_offset + kv_start",
        ["eager"],
        {
            "later keys stand where the first do": "kv_offset=self.kv_offset",
        },
    ),
    *faults(
        CALL,
        "self.padding[:, kv_start:kv_stop]",
        ["sdpa"],
        {
            "later keys get the padding of the first": "self.padding[:, : kv_stop - kv_start]",
        },
    ),
    *faults(
        FUNCTIONS,
        '{"left": cells["sliding_window"] - 1}',
        ["masks"],
        {
            "masks: a window of W sees W + 1": '{"left": cells["sliding_window"]}',
        },
    ),
    *faults(
        FUNCTIONS,
        '"right": cells["sliding_window"]}',
        ["masks"],
        {
            "masks: both ways counts the query": '"right": cells["sliding_window"] - 1}',
        },
    ),
    *faults(
        FUNCTIONS,
        'return {"right": 0}',
        ["masks"],
        {
            "masks: causal is seen as full": "return {}",
        },
    ),
    *faults(
        FUNCTIONS,
        "else min(a, b)",
        ["masks"],
        {
            "masks: the looser of two windows": "else max(a, b)",
        },
    ),
    *faults(
        FUNCTIONS,
        '"chunk_start": cells["left_padding"]',
        ["masks"],
        {
            "masks: chunks begin at the padding": '"chunk_start": None',
        },
    ),
    *faults(
        FUNCTIONS,
        'return {"documents": cells["packed_sequence_mask"]}',
        ["masks"],
        {
            "masks: documents are lost": "return {}",
        },
    ),
    *faults(
        MASKS,
        "and not _is_traced(seen) and bool(seen.all()):",
        ["masks"],
        {
            "masks: padding is lost": "and not _is_traced(seen):",
        },
    ),
    *faults(
        MASKS,
        "mask[:, kv_offset : kv_offset + kv_length]",
        ["masks"],
        {
            "masks: padding of the first keys": "mask[:, :kv_length]",
        },
    ),
    *faults(
        MASKS,
        "torch.where(visible, zero,",
        ["masks"],
        {
            "masks: the additive mask is inverted": "torch.where(~visible, zero,",
        },
    ),
    *faults(
        MASKS,
        "q_offset = q_offset.clone()",
        ["masks", "static"],
        {
            "masks: the position runs on with the cache": "pass",
        },
    ),
    *faults(
        MASKS,
        "and q_offset == 0 and q_length == kv_length",
        ["masks"],
        {
            "masks: a cached prompt counts as packed": "",
        },
    ),
    *faults(
        MASKS,
        "return whole and attention_mask is None",
        ["masks"],
        {
            "masks: a padded batch counts as packed": "return whole",
        },
    ),
)
