"""The group of commands: help, version, exit codes, and errors as text."""

from __future__ import annotations

import subprocess
import sys

import pytest

import adapter
from adapter.errors import CheckpointError

COMMANDS = ("demo", "selftest", "inspect", "verify", "generate", "scan", "env")


def test_help_names_every_command_and_the_exit_codes(sinkhold):
    result = sinkhold("--help")
    assert result.exit_code == 0
    assert all(f" {name} " in result.stdout for name in COMMANDS)
    assert "Exit codes: 0 done, 1 a check failed, 2 wrong usage, 3 refused" in " ".join(result.stdout.split())


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself_and_its_options(sinkhold, command):
    result = sinkhold(command, "--help")
    assert result.exit_code == 0
    lines = [line for line in result.stdout.splitlines() if line.strip()]
    assert lines[0].split()[:3] == ["Usage:", "sinkhold", command]
    assert len(lines[1].split()) > 4
    undocumented = [line for line in lines if line.startswith("│ --") and len(line.strip("│ ").split("  ")) < 2]
    assert not undocumented


def test_version(sinkhold):
    result = sinkhold("--version")
    assert (result.exit_code, result.stdout) == (0, f"sinkhold {adapter.__version__}\n")


def test_unknown_command_is_a_usage_error(sinkhold):
    assert sinkhold("sinks").exit_code == 2


def test_refusal_is_text_on_stderr_and_exit_code_3(sinkhold, tmp_path):
    result = sinkhold("inspect", tmp_path)
    assert result.exit_code == 3
    assert result.stdout == ""
    assert result.stderr.startswith("[SINK-401] the configuration cannot be read: ")
    assert f"where: {tmp_path}" in result.stderr
    assert "fix:   check the path" in result.stderr
    assert "Traceback" not in result.stderr


def test_debug_keeps_the_exception(sinkhold, tmp_path):
    assert isinstance(sinkhold("--debug", "inspect", tmp_path).exception, CheckpointError)


def test_script_reports_a_missing_folder_without_a_traceback():
    command = [sys.executable, "-m", "sinkhold", "inspect", "./not-there"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2
    assert "there is no folder './not-there'" in done.stderr
    assert "Traceback" not in done.stderr
