"""sinkhold demo: the whole of it on three tiny models, offline."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Annotated

import transformers
import typer
from rich.console import Console
from rich.rule import Rule

from ..adapt import report
from .console import ExitCode, out, working
from .tiny import Tiny, entries, write
from .trial import Trial, try_out

_INTRO = """\
A sink is a learned logit for each head that joins the softmax and carries no value. Each model below is tiny, has
random weights and sinks of +2 and more, and is loaded from a checkpoint by adapter.AutoModelForCausalLM. Beside it
run the same weights in transformers' eager attention: with their sinks, and with every sink at -inf, which is what an
attention computes that ignores s_aux. Nothing is downloaded."""


def demo(
    keep: Annotated[
        Path | None, typer.Option("--keep", metavar="FOLDER", help="Write the checkpoints here and leave them.")
    ] = None,
) -> None:
    """Make three tiny models with sinks, load them through the adapter, and show that it is right.

    Exits with 1 when a model's logits differ from transformers' eager attention, or a probe fails.
    """
    started, console = time.monotonic(), out()
    console.print(_INTRO)
    with tempfile.TemporaryDirectory(prefix="sinkhold-") as scratch:
        verdicts = [_show(tiny, (keep or Path(scratch)) / _slug(tiny), console) for tiny in entries()]
    ran = [verdict for verdict in verdicts if verdict is not None]
    console.print(Rule(characters="-"))
    console.print(f"{sum(ran)} of {len(ran)} models are right, in {time.monotonic() - started:.0f} s")
    if keep is not None:
        console.print(f"The checkpoints are in {keep}; try: sinkhold inspect {keep / _slug(entries()[0])}")
    if not ran or not all(ran):
        raise typer.Exit(ExitCode.CHECK_FAILED)


def _slug(tiny: Tiny) -> str:
    return tiny.title.lower().replace(" ", "-")


def _show(tiny: Tiny, folder: Path, console: Console) -> bool | None:
    """Show one model; None when the installed transformers does not have it."""
    from ..verify import verify

    console.print(Rule(tiny.title, characters="-"))
    if not tiny.installed:
        console.print(f"transformers {transformers.__version__} has no {tiny.config}: left out")
        return None
    with working(f"{tiny.title}: loading and generating"):
        write(tiny, folder)
        trial = try_out(tiny, folder)
    console.print(str(report(trial.model)))
    console.print()
    console.print(_comparison(trial))
    with working(f"{tiny.title}: running the probes"):
        verification = verify(trial.model)
    console.print(f"\n{verification}")
    return trial.agrees and trial.is_sensitive and bool(verification.ok)


def _comparison(trial: Trial) -> str:
    runs = (("adapter", trial.adapted), ("eager", trial.eager), ("eager, sinks dropped", trial.dropped))
    lines = [f"  {name:<21} {run.distance(trial.eager):<8.2g} {' '.join(map(str, run.tokens))}" for name, run in runs]
    title = f"  max |logits - eager| (allowed {trial.allowed:.1g}) and the tokens that follow a prompt:"
    return "\n".join([title, *lines])
