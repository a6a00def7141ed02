"""Refuses bad checkpoints: before they load (the files) and after (what the loading came to)."""

from adapter.checkpoint.check import check_checkpoint
from adapter.checkpoint.loading import check_loading_info
from adapter.checkpoint.renames import check_renamed_sinks
from adapter.checkpoint.summary import CheckpointSummary
from adapter.checkpoint.values import check_sink_values

__all__ = [
    "CheckpointSummary",
    "check_checkpoint",
    "check_loading_info",
    "check_renamed_sinks",
    "check_sink_values",
]
