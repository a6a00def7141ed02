"""The command `sinkhold`: one file for each command."""

from __future__ import annotations

from .app import app
from .ranks import leaving_ranks

__all__ = ["app", "main"]


def main() -> None:
    """Run the command line; exits with a code of `adapter.cli.console.ExitCode`."""
    with leaving_ranks():
        app(prog_name="sinkhold")
