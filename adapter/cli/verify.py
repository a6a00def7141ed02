"""sinkhold verify: the probes of adapter.verify on a checkpoint."""

from __future__ import annotations

import typer

from ..backends import registry
from .console import ExitCode, err, out, working
from .load import BackendOption, DtypeOption, JsonOption, PathArgument, TrustOption, check_divides, load_model
from .ranks import TpOption, gathered, is_first, needs_ranks, run_as_ranks


def verify(
    context: typer.Context,
    path: PathArgument,
    json: JsonOption = False,
    backend: BackendOption = registry.AUTO,
    dtype: DtypeOption = "auto",
    trust_remote_code: TrustOption = False,
    tp: TpOption = 1,
) -> None:
    """Load a checkpoint and prove that its attention does what its model says.

    Exits with 1 when a probe fails, on any rank.
    """
    from ..verify import verify as run_probes

    if needs_ranks(tp):
        check_divides(path, tp, trust_remote_code)
        run_as_ranks(tp, context)
    with working("loading"):
        model = load_model(path, backend, dtype, trust_remote_code, tp)
    with working("running the probes"):
        verification = run_probes(model)
    others = gathered("" if verification.ok else str(verification))
    if is_first():
        if json:
            typer.echo(verification.to_json())
        else:
            console = out()
            console.print(verification.table() if console.is_terminal else str(verification))
        for rank, text in enumerate(others):
            if rank and text:
                err().print(f"rank {rank}: {text}")
    if any(others):
        raise typer.Exit(ExitCode.CHECK_FAILED)
