"""Drop-ins for transformers' Auto classes: the same loading, then the adapter."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import transformers
from torch import nn
from transformers import PreTrainedModel

from fusers.base import SinkKind

from .adapt import adapt, find_layers
from .backends import registry
from .blueprint import meta_model, read_config
from .checkpoint import CheckpointSummary, check_checkpoint, check_loading_info, check_renamed_sinks
from .checkpoint.errors import SinkShapeError
from .errors import AdaptError
from .interface import IMPLEMENTATION
from .parallel import parallel_load


class _AutoAdapter:
    """A transformers Auto class whose models come back adapted."""

    auto: ClassVar[Any]

    def __init__(self) -> None:
        raise OSError(
            "it is not made by its constructor: "
            f"use {type(self).__name__}.from_pretrained(...) or {type(self).__name__}.from_config(...)"
        )

    @classmethod
    def from_pretrained(
        cls, path: str, *model_args: Any, backend: str = registry.AUTO, allow_missing_sinks: bool = False, **kwargs: Any
    ) -> Any:
        """Load a checkpoint with transformers and adapt the model.

        Args:
            path: a folder, or the name of a model on a hub.
            backend: 'auto', or the backend that must run every layer.
            allow_missing_sinks: accept a checkpoint without the sinks of its model, to train them from scratch.
            kwargs: everything that transformers' `from_pretrained` takes, handed on unchanged.

        Returns:
            The adapted model; with `output_loading_info=True` the pair of model and loading info that
            transformers gives.

        Raises:
            CheckpointError: the checkpoint must not be loaded as it is.
            SinkholdError: the model has an attention that cannot be run correctly.
        """
        _check_implementation(kwargs)
        if backend != registry.AUTO:
            registry.get(backend)
        wants_info = kwargs.pop("output_loading_info", False)
        with parallel_load(cls.auto, path, kwargs) as load:
            summary = _check_folder(path, load.kwargs)
            model, info = cls._load(path, model_args, load.kwargs, summary)
            load.loaded(model)
            check_loading_info(info, sink_names(model), allow_missing_sinks, model_keys=model.state_dict().keys())
            if summary is not None:
                check_renamed_sinks(summary, model, key_mapping=kwargs.get("key_mapping"))
            adapt(model, backend)
        return (model, info) if wants_info else model

    @classmethod
    def _load(
        cls, path: str, model_args: tuple[Any, ...], kwargs: dict[str, Any], summary: CheckpointSummary | None
    ) -> tuple[Any, dict[str, Any]]:
        try:
            loaded: tuple[Any, dict[str, Any]] = cls.auto.from_pretrained(
                path, *model_args, output_loading_info=True, **kwargs
            )
        except RuntimeError as error:
            # transformers reports shapes that do not fit without naming the tensor; a sink's is worth naming.
            if summary is not None:
                _check_sink_shapes(cls.auto, path, kwargs, summary, error)
            raise
        return loaded

    @classmethod
    def from_config(cls, config: Any, *, backend: str = registry.AUTO, **kwargs: Any) -> Any:
        """Build a model with new weights and adapt it; keywords as in transformers' `from_config`."""
        _check_implementation(kwargs)
        model = cls.auto.from_config(config, **kwargs)
        adapt(model, backend)
        return model


def _check_implementation(kwargs: dict[str, Any]) -> None:
    wanted = kwargs.get("attn_implementation")
    if wanted not in (None, IMPLEMENTATION):
        raise AdaptError(
            f"attn_implementation={wanted!r} names another attention than the adapter's",
            why="one of the two would be ignored in silence",
            fix='leave attn_implementation out and choose with backend="...", or load with transformers itself',
        )


def _check_folder(path: str, kwargs: dict[str, Any]) -> CheckpointSummary | None:
    folder = Path(path)
    if not folder.is_dir() or kwargs.get("gguf_file") is not None or kwargs.get("state_dict") is not None:
        return None
    return check_checkpoint(
        folder,
        use_safetensors=kwargs.get("use_safetensors"),
        subfolder=kwargs.get("subfolder") or "",
        variant=kwargs.get("variant"),
    )


def _check_sink_shapes(
    auto: Any, path: str, kwargs: dict[str, Any], summary: CheckpointSummary, error: RuntimeError
) -> None:
    """Raise SinkShapeError, from `error`, for the first sink whose stored shape is not the model's."""
    model = meta_model(auto, path, kwargs)
    renamed, sinks = check_renamed_sinks(summary, model, key_mapping=kwargs.get("key_mapping")), sink_names(model)
    for key, name in renamed.items():
        stored = tuple(summary.tensors[key].shape)
        expected = tuple(model.get_parameter(name).shape) if name in sinks else stored
        if stored != expected:
            raise SinkShapeError(
                f"the sink {key!r} is {list(stored)} in the checkpoint and {list(expected)} in the model",
                where=str(summary.folder),
            ) from error


def sink_names(model: nn.Module) -> set[str]:
    """The names of all per-head sinks among the model's parameters and buffers."""
    layers = find_layers(model)
    return {
        f"{path}.{finding.sink.source}" if path else str(finding.sink.source)
        for path, finding in layers.items()
        if finding.sink.kind is not SinkKind.NONE and finding.sink.source
    }


class AutoModel(_AutoAdapter):
    """`transformers.AutoModel`, adapted."""

    auto = transformers.AutoModel


class AutoModelForCausalLM(_AutoAdapter):
    """`transformers.AutoModelForCausalLM`, adapted."""

    auto = transformers.AutoModelForCausalLM


class AutoModelForSeq2SeqLM(_AutoAdapter):
    """`transformers.AutoModelForSeq2SeqLM`, adapted."""

    auto = transformers.AutoModelForSeq2SeqLM


class AutoModelForTokenClassification(_AutoAdapter):
    """`transformers.AutoModelForTokenClassification`, adapted."""

    auto = transformers.AutoModelForTokenClassification


class AutoModelForSequenceClassification(_AutoAdapter):
    """`transformers.AutoModelForSequenceClassification`, adapted."""

    auto = transformers.AutoModelForSequenceClassification


class AutoModelForImageTextToText(_AutoAdapter):
    """`transformers.AutoModelForImageTextToText`, adapted."""

    auto = transformers.AutoModelForImageTextToText


def from_pretrained(
    path: str, *model_args: Any, **kwargs: Any
) -> PreTrainedModel | tuple[PreTrainedModel, dict[str, Any]]:
    """Load with the Auto class that the checkpoint's own `architectures` entry names, and adapt the model."""
    config = read_config(path, kwargs)
    architecture = next(iter(getattr(config, "architectures", None) or []), "")
    for suffix, auto in (
        ("ForTokenClassification", AutoModelForTokenClassification),
        ("ForSequenceClassification", AutoModelForSequenceClassification),
        ("ForImageTextToText", AutoModelForImageTextToText),
        ("ForConditionalGeneration", AutoModelForImageTextToText),
        ("Model", AutoModel),
    ):
        if architecture.endswith(suffix):
            return auto.from_pretrained(path, *model_args, **kwargs)
    return AutoModelForCausalLM.from_pretrained(path, *model_args, **kwargs)
