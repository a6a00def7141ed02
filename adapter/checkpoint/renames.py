"""One sink under two names on disk, both of which transformers renames to the same parameter."""

from __future__ import annotations

from typing import Any

from transformers.conversion_mapping import get_model_conversion_mapping

from adapter.checkpoint.errors import DuplicateTensorError
from adapter.checkpoint.sink_names import is_sink_key, registered_spellings
from adapter.checkpoint.summary import CheckpointSummary


def check_renamed_sinks(
    summary: CheckpointSummary, model: Any, *, key_mapping: dict[str, str] | None = None
) -> dict[str, str]:
    """The name in `model` of every stored sink: {key on disk: name after the model's own conversions}.

    Args:
        summary: the checkpoint that the model was loaded from.
        model: the loaded `PreTrainedModel`.
        key_mapping: as given to `from_pretrained`.

    Raises:
        DuplicateTensorError: two keys become one sink. transformers takes the first in alphabetical order.
    """
    conversions = get_model_conversion_mapping(model, key_mapping)
    spellings = registered_spellings()
    renamed: dict[str, str] = {}
    sources: dict[str, str] = {}
    for key in filter(lambda name: is_sink_key(name, spellings=spellings), summary.tensors):
        name = key
        for conversion in conversions:
            name, _ = conversion.rename_source_key(name)
        if name in sources:
            raise DuplicateTensorError(
                f"{sources[name]!r} and {key!r} are both in the checkpoint and both become {name!r}",
                where=str(summary.folder),
                why="the model gets one of the two, and which one depends on their spelling",
            )
        sources[name] = key
        renamed[key] = name
    return renamed
