"""The numbers of a layer's attention that tiles depend on."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .kinds import Kernel, Kind, Length
from .masking import Masking
from .tiles import UNLIMITED


@dataclass(frozen=True)
class LayerShape:
    """One layer: causal, and with a window where it has one.

    Args:
        window: tokens that a query sees, its own included; None for all.
    """

    num_heads: int
    num_kv_heads: int
    qk_head_dim: int
    v_head_dim: int
    dtype: torch.dtype
    window: int | None = None

    def kind(self, kernel: Kernel, length: Length) -> Kind:
        """The kind of the layer's calls."""
        group, windowed = self.num_heads // self.num_kv_heads, self.masking(0).is_windowed
        return Kind(kernel, self.dtype, self.qk_head_dim, self.v_head_dim, group, windowed, length)

    def masking(self, q_origin: int) -> Masking:
        """Which keys the queries from position `q_origin` see."""
        return Masking(q_origin, back=UNLIMITED if self.window is None else self.window - 1, ahead=0)
