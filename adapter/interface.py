"""The one place that registers with transformers: the name `sinkhold` for attention and for its masks."""

from __future__ import annotations

from transformers import AttentionInterface, AttentionMaskInterface

from .attention import sinkhold_attention
from .masks import sinkhold_mask

IMPLEMENTATION = "sinkhold"
"""The value of `attn_implementation`. Names that hold flash, sdpa, flex or paged| trigger checks and downloads."""


def register() -> None:
    """Make `attn_implementation="sinkhold"` known to transformers; again and again is the same as once."""
    AttentionInterface.register(IMPLEMENTATION, sinkhold_attention)
    AttentionMaskInterface.register(IMPLEMENTATION, sinkhold_mask)
