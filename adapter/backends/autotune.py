"""The fastest tiles on this machine: candidates are held to the contract and timed, and the best ones kept on disk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch

from ..errors import BackendError
from ..kernels import choice, tuned_file
from ..kernels.candidates import candidates
from ..kernels.kinds import LENGTHS, Kernel, Kind, Length
from ..kernels.layer_shape import LayerShape
from ..kernels.timing import Clock, cuda_clock, prepared, tokens_of, wall_clock
from ..kernels.tuned_file import TunedRow
from ..kernels.tuning import Tile, capability_of
from .candidate import Candidate, masked_cases, plain_case
from .capability import Feature, Needs
from .triton import BACKEND

FORWARD: tuple[Kernel, ...] = ("prefill", "decode")
TRAINING: tuple[Kernel, ...] = (*FORWARD, "backward_kv", "backward_q")
_GAIN = 0.98
"""What a tile must take of the shipped one's time to replace it: less is noise."""


@dataclass(frozen=True)
class Trial:
    """One candidate that was tried.

    Args:
        number: its place among `total`, from 1; the shipped tile is the first.
        microseconds: of one call; None when it was dropped.
        problem: why it was dropped: it does not compile, or computes something else than the reference.
    """

    kind: Kind
    tile: Tile
    number: int
    total: int
    microseconds: float | None = None
    problem: str | None = None


Say = Callable[[Trial | TunedRow], None]


def default_device() -> torch.device:
    """The current CUDA device; the CPU where kernels are interpreted.

    Raises:
        BackendError: there is no CUDA device.
    """
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    if "cpu" in BACKEND.capability.devices:
        return torch.device("cpu")
    raise BackendError(
        "tuning needs a CUDA device, and this machine has none",
        why="which tile is the fastest shows only on the device that will run it",
        fix="run it on the machine that will run the model",
    )


def tune(
    shape: LayerShape,
    kernels: Sequence[Kernel] = FORWARD,
    lengths: Sequence[Length] = LENGTHS,
    device: torch.device | None = None,
    *,
    clock: Clock | None = None,
    save: bool = True,
    say: Say | None = None,
) -> list[TunedRow]:
    """Find the fastest tile for each kernel and length of a layer, and use it from now on.

    Takes about two seconds for each candidate, mostly the compiler's. Each row is on disk as soon as it is found.

    Args:
        shape: heads, head dims, dtype and window of the layer.
        kernels: FORWARD, or TRAINING with the gradients.
        lengths: classes of the number of keys.
        device: the current CUDA device by default.
        clock: microseconds of one run; CUDA events by default.
        save: write the rows into the user's cache folder.
        say: called with each Trial, and with the TunedRow of each kernel and length.

    Raises:
        BackendError: no device, or one below compute capability 8.0; head dims or a dtype that the kernels do not take;
            a tuned file that cannot be read or written; no candidate that is right.
    """
    device = default_device() if device is None else device
    _check(shape, device)
    if save:
        tuned_file.read(tuned_file.path_of(device))
    clock = clock or (wall_clock if device.type == "cpu" else cuda_clock)
    rows = []
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        for kernel in kernels:
            search = _Search(shape, kernel, device, clock, say or _silent)
            for length in lengths:
                rows.append(search.best(length))
                if save:
                    tuned_file.keep(device, rows[-1:])
                    choice.forget()
    return rows


def _silent(_: Trial | TunedRow) -> None:
    return None


def _check(shape: LayerShape, device: torch.device) -> None:
    capability = capability_of(device) if device.type == "cuda" else None
    heads = (shape.num_heads, shape.num_kv_heads, shape.qk_head_dim, shape.v_head_dim)
    reasons = BACKEND.capability.refusals(Needs(device.type, capability, shape.dtype, *heads, False, Feature.CAUSAL))
    if reasons:
        raise BackendError(
            f"the Triton kernels cannot run this layer: {'; '.join(reasons)}",
            why="there is nothing to tune",
            fix='run it with backend="auto", which takes another backend',
        )


class _Search:
    """The search for one kernel; what is known of a tile holds for every length."""

    def __init__(self, shape: LayerShape, kernel: Kernel, device: torch.device, clock: Clock, say: Say) -> None:
        self.shape, self.kernel, self.device, self.clock, self.say = shape, kernel, device, clock, say
        self.plain = [plain_case(shape, kernel, device)]
        self.masked = masked_cases(shape, kernel, device)
        self.known: dict[tuple[Tile, bool], str | None] = {}

    def best(self, length: Length) -> TunedRow:
        """The fastest tile that is right."""
        kind = self.shape.kind(self.kernel, length)
        trials = self._trials(kind)
        shipped = trials[0]
        timed = [(t.microseconds * (_GAIN if t is shipped else 1), t) for t in trials if t.microseconds is not None]
        for _, trial in sorted(timed, key=lambda pair: pair[0]):
            problem = self._problem(trial.tile, masked=True)
            if problem is None:
                assert trial.microseconds is not None
                row = TunedRow(kind, trial.tile, trial.microseconds, shipped.microseconds)
                self.say(row)
                return row
            self.say(replace(trial, microseconds=None, problem=problem))
        raise BackendError(
            f"no candidate computes {kind} as the reference does", fix="report this device and its driver"
        )

    def _trials(self, kind: Kind) -> list[Trial]:
        q_length, _ = tokens_of(kind.kernel, kind.length, self.device)
        tiles = candidates(kind, capability_of(self.device), q_length * kind.group)
        run_of = prepared(self.shape, kind.kernel, kind.length, self.device)
        found = []
        for number, tile in enumerate(tiles, 1):
            problem = self._problem(tile, masked=False)
            time = self.clock(run_of(tile)) if problem is None else None
            found.append(Trial(kind, tile, number, len(tiles), time, problem))
            self.say(found[-1])
        return found

    def _problem(self, tile: Tile, masked: bool) -> str | None:
        if (tile, masked) not in self.known:
            cases = self.masked if masked else self.plain
            self.known[tile, masked] = Candidate(self.kernel, tile).problem(cases)
        return self.known[tile, masked]
