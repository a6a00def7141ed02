"""sinkhold scan: what the fuser makes of every attention class of a package of models."""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from typing import Annotated

import typer
from rich.progress import Progress, TextColumn, TimeElapsedColumn

from fusers.base import Outcome
from fusers.scan import ScanRow, scan_modules

from .console import err, out, print_json
from .load import JsonOption


def scan(
    json: JsonOption = False,
    package: Annotated[str, typer.Option("--package", help="A package of modeling files.")] = "transformers.models",
) -> None:
    """Read every attention class that calls the attention interface.

    Shows how many there are of each outcome, all that pass a sink, and all that are refused.
    """
    if importlib.util.find_spec(package.partition(".")[0]) is None or importlib.util.find_spec(package) is None:
        raise typer.BadParameter(f"there is no package {package!r}", param_hint="--package")
    rows = list(_counted(scan_modules(package)))
    if json:
        print_json([asdict(row) for row in rows])
        return
    console = out()
    counts = Counter(row.outcome for row in rows)
    total = ", ".join(f"{counts[outcome]} {outcome.value}" for outcome in Outcome if counts[outcome])
    console.print(f"{package}: {len(rows)} attention classes: {total or 'none'}")
    _section("with a sink", [row for row in rows if row.sink and row.outcome is not Outcome.REFUSED])
    _section("refused", [row for row in rows if row.outcome is Outcome.REFUSED])


def _section(title: str, rows: list[ScanRow]) -> None:
    if not rows:
        return
    console = out()
    console.print(f"\n{title} ({len(rows)})")
    for row in rows:
        console.print(f"  {row.module}:{row.line} {row.cls or '(module)'} [{row.outcome.value}]")
        for name, values in (("scale", row.scaling), ("sink", row.sink)):
            if values and row.outcome is not Outcome.REFUSED:
                console.print(f"      {name:<6} {' | '.join(values)}")
        if row.outcome is not Outcome.RESOLVED:
            console.print(f"      why    {row.reason}")


def _counted(rows: Iterator[ScanRow]) -> Iterator[ScanRow]:
    """The same rows, with a running count on stderr when it is a terminal."""
    console = err()
    if not console.is_terminal:
        yield from rows
        return
    columns = (TextColumn("reading sources: {task.completed} classes, {task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=None)
        for row in rows:
            progress.update(task, advance=1, description=row.module.rpartition(".")[2])
            yield row
