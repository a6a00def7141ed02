"""The second source: what one tiny forward really passes to the attention interface."""

from __future__ import annotations

import torch
from torch import nn

from fusers.base import LayerFinding

from .attention import registered_attention
from .errors import SinkholdError
from .pipeline import stage_of

NOT_NEEDED = "no layer to record"


def record(model: nn.Module, layers: dict[str, LayerFinding], wanted: bool | None) -> str:
    """Run two tokens through an adapted model, so that each layer's guard compares the call with its finding.

    Returns:
        One sentence for the report: what was recorded, or why the first real forward has to do it.

    Raises:
        SinkholdError: the source and the run disagree.
    """
    if not layers:
        return NOT_NEEDED
    obstacle = None if wanted else "not asked for" if wanted is False else _obstacle(model)
    if obstacle is None:
        obstacle = _run(model)
    seen = sum(registered_attention(model.get_submodule(path)).recorded is not None for path in layers)  # type: ignore[union-attr]
    if obstacle is None:
        rest = "" if seen == len(layers) else "; the others are compared at their first call"
        return f"source and recorded run agree on {seen} of {len(layers)} layers{rest}"
    return f"compared at the first forward ({obstacle})"


def _obstacle(model: nn.Module) -> str | None:
    """Why a forward here and now would be dear or impossible."""
    if getattr(model, "main_input_name", None) != "input_ids":
        return "the model's main input is not input_ids"
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return "encoder-decoder model"
    if stage_of(model) is not None:
        return "one stage of a pipeline"  # a forward waits for the other stages, which may have been refused
    parameters = list(model.parameters())
    if not parameters:
        return "the model has no parameters"
    if any(hasattr(m, "_hf_hook") for m in model.modules()):
        return "weights dispatched or offloaded by accelerate"
    if any(p.is_meta for p in parameters):
        return "weights on the meta device"
    if any(hasattr(p, "device_mesh") for p in parameters):
        return "sharded weights"
    if len({p.device for p in parameters}) > 1:
        return "weights on several devices"
    return None


def _run(model: nn.Module) -> str | None:
    device = next(model.parameters()).device
    ids = torch.ones(1, 2, dtype=torch.long, device=device)
    modes = [(m, m.training) for m in model.modules()]
    model.eval()
    devices = [device] if device.type == "cuda" else []
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=devices):
            model(input_ids=ids, use_cache=False) if _takes_cache(model) else model(input_ids=ids)
    except SinkholdError:
        raise
    except (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError, NotImplementedError) as error:
        # The model may need other inputs; its own first forward is then compared instead, and the report says so.
        return f"two tokens do not run: {type(error).__name__}: {error}".splitlines()[0]
    finally:
        for module, mode in modes:
            module.training = mode
    return None


def _takes_cache(model: nn.Module) -> bool:
    return hasattr(getattr(model, "config", None), "use_cache")
