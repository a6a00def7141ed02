"""What the fork server imports once, so that a rank starts in a moment."""

import torch

torch.set_num_threads(1)

import adapter  # noqa: E402, F401
import tests.families  # noqa: E402
import tests.parallel.measure  # noqa: E402, F401
