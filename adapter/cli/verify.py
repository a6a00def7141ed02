"""sinkhold verify: the probes of adapter.verify on a checkpoint."""

from __future__ import annotations

import typer

from ..backends import registry
from .console import ExitCode, out, working
from .load import BackendOption, DtypeOption, JsonOption, PathArgument, TrustOption, load_model


def verify(
    path: PathArgument,
    json: JsonOption = False,
    backend: BackendOption = registry.AUTO,
    dtype: DtypeOption = "auto",
    trust_remote_code: TrustOption = False,
) -> None:
    """Load a checkpoint and prove that its attention does what its model says.

    Exits with 1 when a probe fails.
    """
    from ..verify import verify as run_probes

    with working("loading"):
        model = load_model(path, backend, dtype, trust_remote_code)
    with working("running the probes"):
        verification = run_probes(model)
    if json:
        typer.echo(verification.to_json())
    else:
        console = out()
        console.print(verification.table() if console.is_terminal else str(verification))
    if not verification.ok:
        raise typer.Exit(ExitCode.CHECK_FAILED)
