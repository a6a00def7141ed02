"""One tiny checkpoint through the adapter, through transformers' eager, and through eager without its sinks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from ..auto import AutoModelForCausalLM
from .tiny import Tiny, drop_sinks

TOLERANCE = 1e-5
"""Of the logits' scale, in fp32."""
SENSITIVITY = 0.1
"""A dropped sink must move the logits by this much, or the trial could not see it."""


@dataclass(frozen=True)
class Run:
    """What one model says: the continuation's token ids and the prompt's logits."""

    tokens: list[int]
    logits: Tensor

    def distance(self, other: Run) -> float:
        """The largest difference of the logits."""
        return (self.logits - other.logits).abs().max().item()


@dataclass(frozen=True)
class Trial:
    """The three runs; `model` is the adapted one."""

    model: Any
    adapted: Run
    eager: Run
    dropped: Run
    sinks: int

    @property
    def allowed(self) -> float:
        """The difference to eager that fp32 explains."""
        return TOLERANCE * max(1.0, self.eager.logits.abs().max().item())

    @property
    def agrees(self) -> bool:
        """Whether the adapter says what eager says."""
        return self.adapted.distance(self.eager) <= self.allowed and self.adapted.tokens == self.eager.tokens

    @property
    def is_sensitive(self) -> bool:
        """Whether a dropped sink would have been seen."""
        return self.dropped.distance(self.eager) >= SENSITIVITY


def try_out(tiny: Tiny, folder: Path, backend: str = "auto", new_tokens: int = 12) -> Trial:
    """Load the checkpoint in `folder` twice, and run a prompt that is longer than the window."""
    model = AutoModelForCausalLM.from_pretrained(str(folder), backend=backend).eval()
    plain = getattr(transformers, tiny.auto).from_pretrained(folder, attn_implementation="eager").eval()
    adapted, eager = run(model, new_tokens), run(plain, new_tokens)
    sinks = drop_sinks(plain)
    return Trial(model, adapted, eager, run(plain, new_tokens), sinks)


def run(model: Any, new_tokens: int) -> Run:
    """Logits of a fixed prompt of 24 tokens, and what follows it."""
    prompt = (torch.arange(24) * 37 % 97 + 3)[None]
    with torch.no_grad():
        logits = model(input_ids=prompt).logits
    made = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=new_tokens, do_sample=False)
    return Run(made[0, prompt.shape[1] :].tolist(), logits)
