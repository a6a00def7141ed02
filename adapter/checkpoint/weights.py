"""Which files of a folder transformers will load, in its order of preference."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from transformers.utils import (
    ADAPTER_CONFIG_NAME,
    ADAPTER_SAFE_WEIGHTS_NAME,
    ADAPTER_WEIGHTS_NAME,
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
)

from adapter.checkpoint.errors import PickleError, WeightsFileError
from adapter.checkpoint.strict_json import parse_object
from adapter.checkpoint.summary import Form

# transformers releases without this module take no notice of files per rank.
_LOADS_RANK_FILES = find_spec("transformers.distributed.checkpoint") is not None
_RANK_FILE = re.compile(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors")


@dataclass(frozen=True)
class Weights:
    """The files to load: the weights themselves, or the one index that names them."""

    form: Form
    names: tuple[str, ...]

    @property
    def sharded(self) -> bool:
        """Whether the file is an index."""
        return self.names[0].endswith(".json")


def find_weights(base: Path, *, use_safetensors: bool | None, variant: str | None) -> Weights:
    """The files that `from_pretrained` would load from the folder `base`.

    Raises:
        WeightsFileError: there are none.
        PickleError: they are pickles, and `use_safetensors` is not False.
    """
    ranks = _rank_files(base)
    if ranks:
        return Weights(Form.DISTRIBUTED, ranks)
    explicit = _explicit_name(base)
    if explicit is not None and explicit.endswith((".safetensors", ".safetensors.index.json")):
        return Weights(Form.SAFETENSORS, (explicit,))
    safe, pickles = ([], [explicit]) if explicit is not None else _candidates(base, variant)
    if use_safetensors is not False:
        if safe:
            return Weights(Form.SAFETENSORS, (safe[0],))
        if pickles:
            raise PickleError(f"the weights {pickles[0]!r} are a pickle", where=str(base))
    elif pickles:
        return Weights(Form.PICKLE, (pickles[0],))
    wanted = _with_variant(WEIGHTS_NAME if use_safetensors is False else SAFE_WEIGHTS_NAME, variant)
    raise WeightsFileError(f"the folder holds no weights: looked for {wanted} or its index", where=str(base))


def _rank_files(base: Path) -> tuple[str, ...]:
    names = sorted(name for name in os.listdir(base) if name.endswith(".safetensors"))
    return tuple(names) if _LOADS_RANK_FILES and any(_RANK_FILE.fullmatch(name) for name in names) else ()


def _candidates(base: Path, variant: str | None) -> tuple[list[str], list[str]]:
    safe = [_with_variant(name, variant) for name in (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME)]
    pickles = [_with_variant(name, variant) for name in (WEIGHTS_NAME, WEIGHTS_INDEX_NAME)]
    if (base / ADAPTER_CONFIG_NAME).is_file():
        safe, pickles = [*safe, ADAPTER_SAFE_WEIGHTS_NAME], [*pickles, ADAPTER_WEIGHTS_NAME]
    # lexists: a dangling link is a fault to be named, not a reason to look for something else.
    return [n for n in safe if os.path.lexists(base / n)], [n for n in pickles if os.path.lexists(base / n)]


def _explicit_name(base: Path) -> str | None:
    # A config.json may name its weights. One that cannot be read is left to transformers, which needs it first.
    try:
        name = parse_object((base / "config.json").read_bytes()).get("transformers_weights")
    except (OSError, ValueError):
        return None
    return name if isinstance(name, str) else None


def _with_variant(name: str, variant: str | None) -> str:
    if variant is None:
        return name
    stem, _, extension = name.rpartition(".")
    return f"{stem}.{variant}.{extension}"
