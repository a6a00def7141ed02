"""What the source of a model's attention layers says about running on a part of the sequence."""

from __future__ import annotations

from torch import nn

from fusers.base import SinkKind

from ..attention import Attention
from ..errors import ParallelError
from ..guard import where
from ..translate import rewrites_mask
from .sequence import MASK_WHY, RUN_WHOLE


def check_layers(model: nn.Module, layers: list[Attention]) -> None:
    """Raise ParallelError for the first layer whose source rules context parallelism out; runs nothing.

    Args:
        model: the adapted model.
        layers: its Attention submodules.
    """
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise ParallelError(
            "the model has an encoder and a decoder",
            where=type(model).__name__,
            why="their sequences have different lengths and would need cuts of their own",
            fix=RUN_WHOLE,
        )
    for attn in layers:
        module, finding = attn.owner, attn.finding
        place = where(module, attn)
        if finding.sink.kind is SinkKind.PER_TOKEN:
            raise ParallelError(
                f"its sink is computed for each token ({finding.sink.expression})",
                where=place,
                why="neither method moves such sinks with their queries",
                fix=RUN_WHOLE,
            )
        if rewrites_mask(module):
            raise ParallelError("its forward changes the mask", where=place, why=MASK_WHY, fix=RUN_WHOLE)
