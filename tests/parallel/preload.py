"""What the fork server imports once, so that a rank starts in a moment."""

import torch

torch.set_num_threads(1)

import adapter  # noqa: E402
import tests.families  # noqa: E402, F401

for name in ("AutoModelForCausalLM", "AutoModelForTokenClassification", "AutoModelForImageTextToText"):
    getattr(adapter, name)
