"""sinkhold selftest: whether the installation works, in seconds and offline."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
import typer

from ..adapt import restore
from ..backends import registry
from ..errors import EnvironmentFault
from .console import ExitCode, out, working
from .load import BackendOption, check_backend
from .tiny import Tiny, entries, write
from .trial import SENSITIVITY, run, try_out


def selftest(backend: BackendOption = registry.AUTO) -> None:
    """Run a tiny model through the adapter and compare it with transformers.

    Exits with 1 when a check fails.
    """
    check_backend(backend)
    tiny = next((entry for entry in entries() if entry.installed), None)
    if tiny is None:
        raise EnvironmentFault(
            "the installed transformers has none of the models of the self-test", fix="install a newer one"
        )
    console, failed = out(), 0
    with tempfile.TemporaryDirectory(prefix="sinkhold-") as folder, working("running"):
        for passed, text in _checks(tiny, Path(folder), backend):
            failed += not passed
            console.print(f"{'ok  ' if passed else 'FAIL'} {text}")
    console.print("the installation works" if not failed else f"{failed} checks failed")
    if failed:
        raise typer.Exit(ExitCode.CHECK_FAILED)


def _checks(tiny: Tiny, folder: Path, backend: str) -> Iterator[tuple[bool, str]]:
    from ..verify import verify

    write(tiny, folder)
    trial = try_out(tiny, folder, backend, new_tokens=4)
    moved = trial.dropped.distance(trial.eager)
    yield moved >= SENSITIVITY, f"a dropped sink would be seen: it moves the logits by {moved:.2g}"
    off = trial.adapted.distance(trial.eager)
    yield trial.agrees, f"{tiny.title} equals transformers' eager: off by {off:.1e}, {trial.allowed:.1e} is allowed"
    verification = verify(trial.model)
    yield bool(verification.ok), f"adapter.verify: {len(verification.probes)} probes"
    restore(trial.model).set_attn_implementation("eager")
    same = torch.equal(run(trial.model, new_tokens=1).logits, trial.eager.logits)
    yield same, "a restored model equals one that was never adapted, bit by bit"
