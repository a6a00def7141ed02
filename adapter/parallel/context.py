"""Context parallelism: every rank holds a slice of the sequence, and attention sees all of it."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ..adapt import is_adapted
from ..attention import Attention, registered_attention
from ..backends.capability import Needs
from ..errors import ParallelError, SinkholdError
from ..guard import where
from ..masks import SPREAD
from . import ring, ulysses
from .batch import gather_tokens, split_batch
from .call import whole_call
from .gradients import sum_gradients
from .inputs import check_inputs, shifts_labels
from .layers import check_layers
from .locality import check_locality
from .partial import Partial, partial_for
from .sequence import sequence_of

METHODS = ("ulysses", "ring")
_STATE = "_sinkhold_context"


class ContextParallel:
    """A model whose sequence is spread over ranks, from `context_parallel` until `close`.

    Each rank calls the model with its own slice of the sequence, slices in the order of the ranks and of one length,
    as `split` cuts them. A context manager: leaving the block closes it.
    """

    def __init__(
        self, model: nn.Module, group: dist.ProcessGroup | DeviceMesh | None = None, method: str = "ulysses"
    ) -> None:
        self.group = _group_of(group)
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.model, self.method = model, method
        self._layers: list[Attention] = []
        self._handles: list[Any] = []
        self._partials: dict[Needs, Partial] = {}
        self._attach()

    def _attach(self) -> None:
        failed: SinkholdError | None = None
        try:
            self._check()
        except SinkholdError as error:
            failed = error
        _agree(self.group, self.rank, self.method, failed)
        for attn in self._layers:
            attn.context = self
        self._handles = [
            self.model.register_forward_pre_hook(self._enter, with_kwargs=True),
            self.model.register_forward_hook(self._leave, always_call=True),
        ]
        self.model.__dict__[_STATE] = self

    def _check(self) -> None:
        if self.method not in METHODS:
            raise ParallelError(
                f"there is no method {self.method!r}", why="nothing can be run", fix=f"use one of: {', '.join(METHODS)}"
            )
        if not is_adapted(self.model):
            raise ParallelError(
                f"this {type(self.model).__name__} is not adapted",
                why="its attention would see this rank's slice alone",
                fix="call adapter.adapt(model) first",
            )
        if _STATE in self.model.__dict__:
            raise ParallelError(
                "the model's sequence is spread over ranks already",
                why="two contexts would cut it twice",
                fix="close the other context first",
            )
        self._layers = [m for m in self.model.modules() if isinstance(m, Attention)]
        check_layers(self.model, self._layers)
        check_locality(self.model, self._layers, self.size if self.method == "ulysses" else 1)

    def __enter__(self) -> ContextParallel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise ParallelError(
            "a model is copied or pickled while its sequence is spread over ranks",
            why="process groups cannot be copied, and the copy would attend to a slice alone",
            fix="close the context first",
        )

    def close(self) -> None:
        """Give back the model as it was; a second call does nothing."""
        for handle in self._handles:
            handle.remove()
        for attn in self._layers:
            attn.context = None
        self._handles, self._layers = [], []
        self.model.__dict__.pop(_STATE, None)

    def split(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """This rank's slice of a batch, ready for `model(**slice)`.

        Args:
            batch: the whole batch, the same on every rank, tokens along dimension 1: `input_ids` or `inputs_embeds`,
                and `labels`, `position_ids`, a 2D `attention_mask` where there are any.

        Returns:
            The slice with its `position_ids`; where the model's own loss shifts its labels also `shift_labels`, shifted
            before the cut, and `num_items_in_batch`, so that the losses of all ranks sum to that of one process. A
            length that does not divide is padded on the right.

        Raises:
            ParallelError: a tensor cannot be cut along its tokens.
        """
        return split_batch(batch, self.rank, self.size, shifts_labels=shifts_labels(self.model))

    def gather(self, tensor: Tensor, dim: int = 1, length: int | None = None) -> Tensor:
        """A tensor of all ranks along its tokens, without gradient, the same on every rank.

        Args:
            tensor: this rank's part, of the same shape on every rank, such as logits [batch, length, vocabulary].
            dim: where its tokens lie.
            length: tokens of the whole sequence, to leave out the padding of `split`.
        """
        return gather_tokens(tensor, self.group, dim, length)

    def total(self, loss: Tensor) -> Tensor:
        """The sum of a scalar over the ranks, without gradient: the loss of the whole batch."""
        loss = loss.detach().clone()
        dist.all_reduce(loss, group=self.group)
        return loss

    def reduce_gradients(self, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """Sum the gradients over the ranks, the sinks' like all others; each rank then has those of one process.

        Args:
            parameters: those to reduce; None for all of the model.

        Raises:
            ParallelError: a parameter is sharded over these ranks, as FSDP does, which reduces its gradients itself.
        """
        sum_gradients(self.model.parameters() if parameters is None else parameters, self.group)

    def attend(
        self,
        attn: Attention,
        qkv: tuple[Tensor, Tensor, Tensor],
        mask: Any,
        sink: Tensor | None,
        kwargs: dict[str, Any],
    ) -> Tensor:
        """See adapter.attention.Context."""
        call = whole_call(attn, qkv, mask, sink, kwargs)
        place = where(attn.owner, attn)
        if call.visibility.kv_length != self.size * call.key.shape[2]:
            raise ParallelError(
                "the layer runs outside the model's forward, or on other tokens than those of the sequence",
                where=place,
                why="what the other ranks hold of these tokens is not known",
                fix="call the model that was given to context_parallel",
            )
        if call.visibility.documents is not None and kwargs.get("position_ids") is None:
            raise ParallelError(
                "packed documents, and the call has no position_ids that tell whether this layer keeps them apart",
                where=place,
                why="documents would see each other in one process and not on several ranks, or the other way round",
                fix="pass one document in each row",
            )
        if self.method == "ulysses":
            return ulysses.attend(call, self.group, attn.run, place)
        needs = Needs.of(call)
        partial = self._partials.get(needs)
        if partial is None:
            partial = self._partials[needs] = partial_for(attn.backend, needs, place)
        attn.chosen[needs] = partial.name
        return ring.attend(call, self.group, partial)

    def _enter(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], Any]:
        for attn in self._layers:
            if registered_attention(attn.owner) is not attn:
                raise ParallelError(
                    "the model was restored or adapted again while its sequence is spread over ranks",
                    where=attn.path,
                    why="its attention would see this rank's slice alone",
                    fix="close the context first",
                )
        names = list(inspect.signature(type(model).forward).parameters)[1:]
        inputs = {**dict(zip(names, args, strict=False)), **kwargs}
        check_inputs(model, inputs)
        sequence, positions = sequence_of(inputs, self.group)
        SPREAD.set(sequence.spread)
        # Every mask gets the padding of the whole sequence from `sequence`; the model must not cut its own from a part.
        inputs |= {"position_ids": positions, "attention_mask": None}
        if "use_cache" in names:
            inputs["use_cache"] = False
        return (), inputs

    def _leave(self, *_: Any) -> None:
        SPREAD.set(None)


def context_parallel(
    model: nn.Module, group: dist.ProcessGroup | DeviceMesh | None = None, method: str = "ulysses"
) -> ContextParallel:
    """Spread the sequence of an adapted model over ranks; every rank of the group must call it.

    Args:
        model: an adapted model with its weights, alike on every rank of the group.
        group: the ranks that share a sequence: a process group, a device mesh of one dimension, or None for all ranks.
        method: 'ulysses' trades parts of the sequence for parts of the heads, which must divide by the ranks; 'ring'
            sends keys and values around, with memory for two slices of them, for any number of heads.

    Returns:
        The context: a context manager, or to be closed by hand.

    Raises:
        ParallelError: on every rank, when a layer or the model around it has a meaning only on the whole sequence.
    """
    return ContextParallel(model, group, method)


def _group_of(group: dist.ProcessGroup | DeviceMesh | None) -> dist.ProcessGroup:
    if not (dist.is_available() and dist.is_initialized()):
        raise ParallelError(
            "torch.distributed is not initialised",
            why="a sequence is spread over the ranks of a process group",
            fix="start the script with torchrun and call torch.distributed.init_process_group()",
        )
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ParallelError(
                f"the device mesh has {group.ndim} dimensions",
                why="only one of them holds the ranks that share a sequence",
                fix='pass that one, for example mesh["cp"]',
            )
        return group.get_group()
    if group is not None:
        return group
    whole = dist.group.WORLD
    assert whole is not None
    return whole


def _agree(group: dist.ProcessGroup, rank: int, method: str, error: SinkholdError | None) -> None:
    """Raise on every rank when one of them refuses, or when they do not want the same."""
    said: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(said, (method, None if error is None else str(error)), group=group)
    if error is not None:
        raise error
    for other, (its, text) in enumerate(said):
        if text is not None:
            raise ParallelError(f"rank {other} refuses: {text}", why="the other ranks would wait for it for ever")
        if its != method:
            raise ParallelError(
                f"rank {rank} asks for {method!r} and rank {other} for {its!r}",
                why="the ranks would wait for each other for ever",
                fix="use the same method on every rank",
            )
