"""The kinds of calls that tiles are tuned for."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

import torch

Kernel = Literal["prefill", "decode", "backward_kv", "backward_q"]
Length = Literal["short", "middle", "long"]
KERNELS: tuple[Kernel, ...] = get_args(Kernel)
LENGTHS: tuple[Length, ...] = get_args(Length)
_SHORT, _MIDDLE = 1024, 8192
_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


def length_of(kv_length: int) -> Length:
    """The class of a number of keys: short up to 1024, middle up to 8192, long beyond."""
    if kv_length <= _SHORT:
        return "short"
    return "middle" if kv_length <= _MIDDLE else "long"


@dataclass(frozen=True)
class Kind:
    """What a tuned tile is for.

    Args:
        group: query heads of one kv head.
        windowed: a row sees so few keys that the edges weigh more than the middle.
        length: the class of the number of keys.
    """

    kernel: Kernel
    dtype: torch.dtype
    qk_head_dim: int
    v_head_dim: int
    group: int
    windowed: bool
    length: Length

    def __str__(self) -> str:
        seen = "window" if self.windowed else "causal"
        dims = f"{self.qk_head_dim}/{self.v_head_dim}"
        return f"{self.kernel} {_name(self.dtype)}, head dims {dims}, group {self.group}, {seen}, {self.length}"

    @property
    def width(self) -> int:
        """The greater of the head dims."""
        return max(self.qk_head_dim, self.v_head_dim)

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON holds them."""
        return {**asdict(self), "dtype": _name(self.dtype)}


def kind_of(data: Any) -> Kind:
    """A kind as JSON holds it.

    Raises:
        ValueError: a field is unknown or missing, or has a value that it cannot have.
    """
    if not isinstance(data, dict) or data.keys() != {field.name for field in fields(Kind)}:
        raise ValueError(f"a kind of call is {data!r}")
    numbers = [data[name] for name in ("qk_head_dim", "v_head_dim", "group")]
    known = data["kernel"] in KERNELS and data["length"] in LENGTHS and data["dtype"] in tuple(_DTYPES)
    if not known or not isinstance(data["windowed"], bool) or not all(type(n) is int and n > 0 for n in numbers):
        raise ValueError(f"a kind of call is {data!r}")
    return Kind(**{**data, "dtype": _DTYPES[data["dtype"]]})


def dtype_of(name: str) -> torch.dtype | None:
    """The dtype called `name`; None for one that the kernels do not take."""
    return _DTYPES.get(name)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
