"""The commands put together."""

from __future__ import annotations

from typing import Annotated

import typer

import adapter

from .console import Commands, quiet_transformers
from .demo import demo
from .env import env
from .generate import generate
from .inspect import inspect
from .scan import scan
from .selftest import selftest
from .tune import tune
from .verify import verify

app = typer.Typer(
    name="sinkhold",
    cls=Commands,
    help="Hugging Face models with attention sinks, run correctly and fast.",
    epilog="Exit codes: 0 done, 1 a check failed, 2 wrong usage, 3 refused with an error that says why and what to do.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"sinkhold {adapter.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show a traceback when something is refused.")] = False,
) -> None:
    """Options of every command, given before its name."""
    quiet_transformers()


for _command in (demo, selftest, inspect, verify, generate, tune, scan, env):
    app.command()(_command)
