"""What the commands share: exit codes, the two consoles, progress on a terminal, errors as text."""

from __future__ import annotations

import enum
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from ..errors import SinkholdError

ARGUMENTS = "sinkhold.arguments"
"""Where a context's meta keeps the words after `sinkhold`."""


class ExitCode(enum.IntEnum):
    """What the exit status means."""

    OK = 0
    CHECK_FAILED = 1
    USAGE = 2
    REFUSED = 3
    """a SinkholdError: its text is on stderr"""


def out() -> Console:
    """Results. Made at each use, so that a redirected stdout is seen."""
    return Console(highlight=False, soft_wrap=True, markup=False)


def err() -> Console:
    """Errors and progress."""
    return Console(stderr=True, highlight=False, soft_wrap=True, markup=False)


def print_json(data: Any) -> None:
    """Plain JSON on stdout, never coloured or wrapped."""
    typer.echo(json.dumps(data, indent=2, default=str))


@contextmanager
def working(text: str) -> Iterator[None]:
    """A spinner on stderr while something long runs; nothing when stderr is no terminal."""
    console = err()
    if not console.is_terminal:
        yield
        return
    with console.status(text):
        yield


def quiet_transformers() -> None:
    """No bars and no advice of transformers between our lines, unless its own variable asks for them."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    if "TRANSFORMERS_VERBOSITY" not in os.environ:
        logging.set_verbosity_error()


class Commands(TyperGroup):
    """The group of commands; a SinkholdError becomes its text on stderr and exit code 3."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Keep the words of the command line, so that a command can be run again as several ranks."""
        ctx.meta[ARGUMENTS] = tuple(args)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the command that was asked for."""
        try:
            return super().invoke(ctx)
        except SinkholdError as error:
            if ctx.params.get("debug"):
                raise
            err().print(str(error))
            raise typer.Exit(ExitCode.REFUSED) from None
