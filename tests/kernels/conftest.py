"""Without a CUDA device the kernels run in Triton's interpreter, which has to be asked for before they are imported."""

from __future__ import annotations

import os
import sys

import pytest
import torch

if not torch.cuda.is_available():
    if "adapter.kernels.tiles" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("the kernels were imported before TRITON_INTERPRET=1 was set", allow_module_level=True)
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture
def device() -> torch.device:
    """Where the kernels run here."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
