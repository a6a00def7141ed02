"""Which keys of a checkpoint speak of a sink, whatever the model."""

from __future__ import annotations

import re
from collections.abc import Collection
from functools import cache

from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

# "sinks", "attn_sink", "sink_proj", "sink2"; not "sinkhorn" or "sinking".
_WORD = re.compile(r"sinks?(?![a-z])", re.IGNORECASE)
_PARTS = {"weight", "bias"}


def is_sink_key(key: str, *, spellings: Collection[str] = ()) -> bool:
    """Whether the last name in a dotted key, `weight` and `bias` aside, speaks of a sink.

    Args:
        key: a key of a checkpoint or of a state dict.
        spellings: further names that mean a sink, see `registered_spellings`.
    """
    leaf = _leaf(key)
    return leaf in spellings or _WORD.search(leaf) is not None


@cache
def registered_spellings() -> frozenset[str]:
    """Names on disk that transformers' registered conversions rename to a sink.

    Read from the conversions themselves, so that a name such as a plain "offset" is known as soon as any model
    renames it to a sink. Takes a quarter of a second once.
    """
    return frozenset(
        _leaf(source.rstrip("$").replace("\\.", "."))
        for model_type in CONFIG_MAPPING_NAMES
        for conversion in get_checkpoint_conversion_mapping(model_type) or ()
        for source, target in zip(conversion.source_patterns, conversion.target_patterns, strict=False)
        if is_sink_key(target)
    )


def _leaf(key: str) -> str:
    names = key.split(".")
    return names[-2] if len(names) > 1 and names[-1] in _PARTS else names[-1]
