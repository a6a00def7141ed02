"""One tiny checkpoint for all commands, and a runner that keeps stdout and stderr apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from transformers.utils import logging
from typer.testing import CliRunner

from adapter.cli.app import app
from adapter.cli.tiny import entries, write


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    write(entries()[0], folder)
    return folder


@pytest.fixture
def sinkhold(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable]:
    """Call the command line in this process: `sinkhold("inspect", path)`."""
    verbosity = logging.get_verbosity()
    monkeypatch.setenv("COLUMNS", "200")
    runner = CliRunner()
    yield lambda *arguments: runner.invoke(app, [str(a) for a in arguments])
    logging.set_verbosity(verbosity)
    logging.enable_progress_bar()
