"""What loading a checkpoint came to: no sink may be missing, thrown away or of another shape."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from adapter.checkpoint.errors import MissingSinkError, SinkShapeError, UnexpectedSinkError
from adapter.checkpoint.listing import listing
from adapter.checkpoint.sink_names import is_sink_key, registered_spellings


def check_loading_info(
    info: Mapping[str, Any],
    sink_names: Collection[str],
    allow_missing_sinks: bool,
    *,
    model_keys: Collection[str] = (),
) -> None:
    """Check the loading info of `from_pretrained(..., output_loading_info=True)`.

    Args:
        info: `missing_keys` and `unexpected_keys` are names, `mismatched_keys` triples of name, shape in the
            checkpoint and shape in the model.
        sink_names: the model's sink parameters, by their names in its state dict. Empty for a model without sinks.
        allow_missing_sinks: missing sinks pass (training from scratch).
        model_keys: the model's state dict keys. With them, an unexpected sink of a model with sinks is refused where
            the model has the module that it belongs to, and passes where that whole module is absent (a layer cut off).

    Raises:
        MissingSinkError: sinks of the model are not in the checkpoint.
        SinkShapeError: they are, with other shapes (transformers lets this through with ignore_mismatched_sizes=True).
        UnexpectedSinkError: the checkpoint has sinks for which the model has no place.
    """
    sinks = set(sink_names)
    _check_mismatched(info.get("mismatched_keys", ()), sinks)
    missing = sorted(sinks.intersection(info.get("missing_keys", ())))
    if missing and not allow_missing_sinks:
        raise MissingSinkError(f"the checkpoint lacks the sinks {listing(missing)}", where=missing[0])
    _check_unexpected(info.get("unexpected_keys", ()), sinks, model_keys)


def _check_mismatched(mismatched: Collection[tuple[str, Any, Any]], sinks: set[str]) -> None:
    for name, stored, expected in sorted(mismatched, key=lambda entry: entry[0]):
        if name in sinks:
            raise SinkShapeError(
                f"the sink {name!r} is {list(stored)} in the checkpoint and {list(expected)} in the model", where=name
            )


def _check_unexpected(unexpected: Collection[str], sinks: set[str], model_keys: Collection[str]) -> None:
    if not unexpected:
        return
    spellings = registered_spellings()
    found = sorted(key for key in unexpected if is_sink_key(key, spellings=spellings))
    if sinks:
        modules = {prefix for key in model_keys for prefix in _prefixes(key)}
        found = [key for key in found if _owner(key) in modules]
    if found:
        raise UnexpectedSinkError(f"the checkpoint has sinks, the model has no place for them: {listing(found)}")


def _owner(key: str) -> str:
    """The module that a sink belongs to: above `sinks`, and above `sink_proj` in `sink_proj.weight`."""
    owner, _, leaf = key.rpartition(".")
    return owner.rpartition(".")[0] if leaf in {"weight", "bias"} else owner


def _prefixes(key: str) -> list[str]:
    names = key.split(".")
    return [".".join(names[:count]) for count in range(1, len(names))]
