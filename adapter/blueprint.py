"""A checkpoint's configuration and its model without weights."""

from __future__ import annotations

from typing import Any

import torch
import transformers

_CONFIG_KEYWORDS = (
    "cache_dir", "token", "revision", "subfolder", "local_files_only", "trust_remote_code", "force_download",
)  # fmt: skip


def read_config(path: str, kwargs: dict[str, Any]) -> Any:
    """The configuration that transformers' from_pretrained would use for `path` and its keywords."""
    shared = {name: kwargs[name] for name in _CONFIG_KEYWORDS if name in kwargs}
    return kwargs.get("config") or transformers.AutoConfig.from_pretrained(path, **shared)


def meta_model(auto: Any, path: str, kwargs: dict[str, Any]) -> Any:
    """The model that the transformers Auto class `auto` would load, on the meta device."""
    config = read_config(path, kwargs)
    trust = {"trust_remote_code": kwargs["trust_remote_code"]} if "trust_remote_code" in kwargs else {}
    with torch.device("meta"):
        return auto.from_config(config, **trust)
