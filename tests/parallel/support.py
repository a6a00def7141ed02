"""What the installed transformers can do."""

from __future__ import annotations

import pytest
from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES

needs_local_params = pytest.mark.skipif(
    "local_params" not in ALL_PARALLEL_STYLES, reason="this transformers cannot keep a sharded sink local"
)
