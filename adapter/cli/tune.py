"""sinkhold tune: the fastest tiles of the Triton kernels on this machine, kept in the user's cache folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer

from ..adapt import adapt
from ..attention import Attention
from ..backends import registry
from ..errors import BackendError
from ..report import expected_needs
from .console import err, out, working
from .load import DtypeOption, TrustOption, build_on_meta

if TYPE_CHECKING:
    from ..backends.autotune import Trial
    from ..kernels.layer_shape import LayerShape
    from ..kernels.tuned_file import TunedRow
    from ..kernels.tuning import Tile

_INTERPRETER = "The kernels are interpreted here, whose times mean nothing: nothing is kept."


def tune(
    model: Annotated[
        str | None, typer.Option("--model", metavar="PATH", help="A checkpoint whose layers are tuned for.")
    ] = None,
    heads: Annotated[int | None, typer.Option("--heads", min=1, help="Query heads of one layer.")] = None,
    kv_heads: Annotated[
        int | None, typer.Option("--kv-heads", min=1, help="Its kv heads; as many as --heads by default.")
    ] = None,
    head_dim: Annotated[int | None, typer.Option("--head-dim", min=1, help="Its head dim.")] = None,
    v_head_dim: Annotated[
        int | None, typer.Option("--v-head-dim", min=1, help="That of its values, where it differs.")
    ] = None,
    window: Annotated[
        int | None, typer.Option("--window", min=1, help="Tokens that a query sees; all by default.")
    ] = None,
    dtype: DtypeOption = "auto",
    training: Annotated[bool, typer.Option("--training", help="The kernels of the gradients too.")] = False,
    show: Annotated[bool, typer.Option("--list", help="Show what is kept, and tune nothing.")] = False,
    reset: Annotated[bool, typer.Option("--reset", help="Delete what is kept, and tune nothing.")] = False,
    trust_remote_code: TrustOption = False,
) -> None:
    """Find the fastest tiles of the Triton kernels on this GPU, and keep them for every later run.

    Takes minutes. Without it the tiles that the project ships are used, which are right everywhere and tuned for few
    GPUs.
    """
    numbers = (heads, kv_heads, head_dim, v_head_dim, window)
    _check_usage(model is not None, any(n is not None for n in numbers), show, reset)
    registry.get("triton")  # where it cannot be imported, this says why
    if show:
        _show()
    elif reset:
        _reset()
    else:
        from ..backends.autotune import FORWARD, TRAINING, default_device

        device = default_device()
        shapes = _of_model(model, dtype, trust_remote_code) if model is not None else [_of_numbers(*numbers, dtype)]
        _tune(shapes, TRAINING if training else FORWARD, device)


def _check_usage(model: bool, numbers: bool, show: bool, reset: bool) -> None:
    if sum((model, numbers, show, reset)) != 1:
        raise typer.BadParameter(
            "give one of --model PATH, --heads N --head-dim N, --list and --reset", param_hint="--model"
        )


def _of_numbers(
    heads: int | None,
    kv_heads: int | None,
    head_dim: int | None,
    v_head_dim: int | None,
    window: int | None,
    dtype: str,
) -> LayerShape:
    from ..kernels.layer_shape import LayerShape

    if heads is None or head_dim is None:
        raise typer.BadParameter("a layer needs --heads and --head-dim", param_hint="--heads")
    return LayerShape(heads, kv_heads or heads, head_dim, v_head_dim or head_dim, _dtype(dtype, torch.bfloat16), window)


def _dtype(name: str, otherwise: torch.dtype) -> torch.dtype:
    from ..kernels.kinds import dtype_of

    found = otherwise if name == "auto" else dtype_of(name)
    if found is None:
        raise typer.BadParameter(f"the kernels take no {name!r}", param_hint="--dtype")
    return found


def _of_model(path: str, dtype: str, trust_remote_code: bool) -> list[LayerShape]:
    """The different shapes of a checkpoint's layers, from its configuration."""
    from ..kernels.layer_shape import LayerShape

    with working("building the model without weights"):
        model = build_on_meta(path, trust_remote_code)
        adapt(model, recording=False)
    found = []
    for attn in (module for module in model.modules() if isinstance(module, Attention)):
        for needs in expected_needs(attn)[:1]:
            numbers = (needs.num_heads, needs.num_kv_heads, needs.qk_head_dim, needs.v_head_dim)
            window = attn.registered.get("sliding_window")
            found.append(LayerShape(*numbers, _dtype(dtype, needs.dtype), window))
    if not found:
        raise BackendError(
            "no attention layer of this model tells its heads and head dim",
            where=path,
            why="tiles depend on them",
            fix="give them: sinkhold tune --heads N --kv-heads N --head-dim N",
        )
    # Shapes that are one kind of call would overwrite each other.
    return list({shape.kind("prefill", "short"): shape for shape in reversed(found)}.values())[::-1]


def _tune(shapes: list[LayerShape], kernels: tuple[Any, ...], device: torch.device) -> None:
    from ..backends.autotune import tune as run
    from ..kernels import tuned_file

    interpreted = device.type == "cpu"
    if interpreted:
        err().print(_INTERPRETER)
    with _saying() as say:
        for shape in shapes:
            run(shape, kernels, device=device, save=not interpreted, say=say)
    if not interpreted:
        out().print(f"kept in {tuned_file.path_of(device)}")


@contextmanager
def _saying() -> Iterator[Callable[[Trial | TunedRow], None]]:
    """Prints each result and each dropped candidate; on a terminal also how far the search is."""
    from ..kernels.tuned_file import TunedRow

    errors = err()
    status = errors.status("starting") if errors.is_terminal else None

    def say(event: Trial | TunedRow) -> None:
        if isinstance(event, TunedRow):
            out().print(_result(event))
            return
        if event.problem is not None:
            errors.print(f"  dropped {_shown(event.tile)}: {event.problem}")
        if status is not None:
            time = "dropped" if event.microseconds is None else f"{event.microseconds:.1f} us"
            status.update(f"{event.kind}: {event.number} of {event.total}, {time}")

    if status is None:
        yield say
        return
    with status:
        yield say


def _result(row: TunedRow) -> str:
    shipped = "dropped" if row.shipped_microseconds is None else f"{row.shipped_microseconds:.1f} us"
    return f"{row.kind}: {row.microseconds:.1f} us (shipped: {shipped}), {_shown(row.tile)}"


def _shown(tile: Tile) -> str:
    numbers = {"warps": tile.warps, "stages": tile.stages, "registers": tile.registers, "splits": tile.splits}
    flags = {"packed": tile.packed, "phases": tile.phases, "gluon": tile.gluon}
    parts = [f"{name} {number}" for name, number in numbers.items() if number]
    return ", ".join([f"{tile.rows}x{tile.columns}", *parts, *(name for name, is_on in flags.items() if is_on)])


def _show() -> None:
    from ..kernels import tuned_file

    console, found = out(), tuned_file.files()
    for file in found:
        header = file.header
        console.print(f"{file.path}: {header.device}, compute capability {header.capability}, triton {header.triton}")
        if not header.is_current:
            console.print("  measured with another triton or other kernels: not used")
        for row in file.rows:
            console.print(f"  {_result(row)}")
    if not found:
        console.print(f"nothing is tuned: {tuned_file.folder()} holds no file")


def _reset() -> None:
    from ..kernels import tuned_file

    found = tuned_file.remove()
    for path in found:
        out().print(f"deleted {path}")
    if not found:
        out().print("nothing was tuned")
