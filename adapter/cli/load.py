"""From the PATH of a command to a configuration or a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, cast

import torch
import transformers
import typer
from transformers import PreTrainedModel

from ..auto import from_pretrained
from ..backends import registry
from ..errors import CheckpointError
from ..parallel import derive_plan

PathArgument = Annotated[str, typer.Argument(metavar="PATH", help="A checkpoint's folder, or a model's name on a hub.")]
BackendOption = Annotated[str, typer.Option("--backend", help="The backend that must run every layer, or 'auto'.")]
TrustOption = Annotated[
    bool, typer.Option("--trust-remote-code", help="Let transformers run Python files of the checkpoint itself.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]
DtypeOption = Annotated[str, typer.Option("--dtype", help="auto, float32, bfloat16 or float16.")]


def check_path(path: str) -> None:
    """A usage error for what can only be a folder and is none."""
    looks_local = path.startswith((".", "/", "~")) or path.count("/") > 1 or "\\" in path
    if looks_local and not Path(path).is_dir():
        raise typer.BadParameter(f"there is no folder {path!r}", param_hint="PATH")


def check_backend(name: str) -> None:
    """A usage error for a backend that does not exist."""
    known = [registry.AUTO, *registry.names()]
    if name not in known:
        raise typer.BadParameter(f"there is no backend {name!r}; known: {', '.join(known)}", param_hint="--backend")


def read_config(path: str, trust_remote_code: bool) -> Any:
    """The checkpoint's configuration.

    Raises:
        CheckpointError: transformers cannot read it; its reason is the error's text.
    """
    check_path(path)
    try:
        return transformers.AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(
            f"the configuration cannot be read: {reason}",
            where=path,
            why="without config.json nothing is known about the model",
            fix="check the path; a new model needs a newer transformers, one with Python files --trust-remote-code",
        ) from error


def load_model(path: str, backend: str, dtype: str, trust_remote_code: bool, tp: int = 1) -> PreTrainedModel:
    """The adapted model, on the GPUs when there are any; with `tp` ranks this rank's part of it on its own device."""
    check_backend(backend)
    if dtype != "auto" and not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise typer.BadParameter(f"{dtype!r} is not a dtype", param_hint="--dtype")
    config = read_config(path, trust_remote_code)
    keywords: dict[str, Any] = {"device_map": "auto"} if torch.cuda.is_available() else {}
    if tp > 1:
        keywords = {"tp_plan": "auto"}
    model = from_pretrained(
        path, config=config, backend=backend, dtype=dtype, trust_remote_code=trust_remote_code, **keywords
    )
    return cast(PreTrainedModel, model).eval()


def check_divides(path: str, ranks: int, trust_remote_code: bool) -> None:
    """Raise what every rank would raise for a model that `ranks` ranks cannot share, before any of them is started.

    Raises:
        ParallelError: heads, sinks or experts do not divide; it names the sizes that would work.
    """
    derive_plan(build_on_meta(path, trust_remote_code), ranks)


def build_on_meta(path: str, trust_remote_code: bool) -> PreTrainedModel:
    """The checkpoint's model without any weights.

    Raises:
        CheckpointError: the configuration cannot be read, or names no model that is installed.
    """
    config = read_config(path, trust_remote_code)
    with torch.device("meta"):
        model: PreTrainedModel = _maker(config, path, trust_remote_code)(config)
    return model.eval()


def _maker(config: Any, path: str, trust_remote_code: bool) -> Any:
    name = next(iter(getattr(config, "architectures", None) or []), None)
    cls = getattr(transformers, name, None) if name else None
    if cls is not None:
        return cls._from_config
    remote = [key for key in getattr(config, "auto_map", None) or {} if key.startswith("AutoModel")]
    if trust_remote_code and remote:
        auto = getattr(transformers, remote[0])
        return lambda config: auto.from_config(config, trust_remote_code=True)
    raise CheckpointError(
        f"config.json names the architecture {name!r}, which transformers {transformers.__version__} does not have"
        if name
        else "config.json names no architecture",
        where=path,
        why="which class to build is not a thing to guess",
        fix='name a class of transformers under "architectures" in config.json, or install a transformers that has it',
    )
