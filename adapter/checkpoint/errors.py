"""One class for each way in which a checkpoint can be bad."""

from __future__ import annotations

from adapter.errors import CheckpointError

EXPORT_AGAIN = "download the checkpoint again, or export it with model.save_pretrained(folder)"


class PathError(CheckpointError):
    """A file of the checkpoint lies outside its folder."""

    code = "SINK-402"
    default_why = "a checkpoint could make the loader read any file of this machine as weights"
    default_fix = "copy the file into the checkpoint's folder and name it by its plain file name"


class IndexFileError(CheckpointError):
    """The index of a sharded checkpoint is not an index."""

    code = "SINK-403"
    default_why = "the index alone says which file holds which tensor"
    default_fix = EXPORT_AGAIN


class ShardError(CheckpointError):
    """A file of weights is named and not there, or cannot be read."""

    code = "SINK-404"
    default_why = "its tensors would be missing"
    default_fix = "download the file again, or point its link at an existing file"


class ShardKeyError(CheckpointError):
    """A shard lacks a tensor that the index promises."""

    code = "SINK-405"
    default_why = "the tensor would be initialised at random, with a line in a report as the only sign"
    default_fix = EXPORT_AGAIN


class DuplicateTensorError(CheckpointError):
    """One tensor is stored twice, with two values."""

    code = "SINK-406"
    default_why = "which of the two the model gets depends on the order of the files"
    default_fix = "remove the tensor from the file that should not hold it, or export the checkpoint again"


class HeaderError(CheckpointError):
    """A safetensors file whose header is wrong."""

    code = "SINK-407"
    default_why = "the header says which bytes belong to which tensor"
    default_fix = EXPORT_AGAIN


class PickleError(CheckpointError):
    """The weights are pickles and nobody asked for pickles."""

    code = "SINK-408"
    default_why = "a pickle is a program that runs while it is read"
    default_fix = (
        "convert the weights to safetensors; if you trust their origin, pass use_safetensors=False "
        "(they are still read with weights_only=True)"
    )


class PickleContentError(CheckpointError):
    """A pickle that is more, or less, than tensors."""

    code = "SINK-409"
    default_why = "the file would run code, or take memory that its size does not announce"
    default_fix = "ask the author for safetensors; save tensors with .contiguous() when you export them yourself"


class WeightsFileError(CheckpointError):
    """The folder holds no weights."""

    code = "SINK-410"
    default_why = "there is nothing to load"
    default_fix = "check the path, subfolder= and variant="


class SinkValueError(CheckpointError):
    """A sink is NaN or +inf."""

    code = "SINK-411"
    default_why = "the softmax of its head would be NaN or all zero (-inf is fine: it means no sink)"
    default_fix = EXPORT_AGAIN


class MissingSinkError(CheckpointError):
    """The model has sinks and the checkpoint does not."""

    code = "SINK-412"
    default_why = "they would be initialised at random; a sink of 0 is not the same as no sink either"
    default_fix = "load a checkpoint that holds them; to train from scratch pass allow_missing_sinks=True"


class SinkShapeError(CheckpointError):
    """A sink of the checkpoint has another shape than the model's."""

    code = "SINK-413"
    default_why = "a sink belongs to one head; one of another shape is thrown away and initialised at random"
    default_fix = "load it with the configuration that it was saved with: the number of attention heads differs"


class UnexpectedSinkError(CheckpointError):
    """The checkpoint has sinks and the model has no place for them."""

    code = "SINK-414"
    default_why = "they would be dropped: the model would run, and give other text than its author's"
    default_fix = "load it with the class that its config.json names, or a newer transformers"
