"""Reads commands and code blocks out of README.md and docs/, so that CI runs exactly what people read.

readme.py commands test|run   prints the shell lines of the block whose info string says so
readme.py blocks              runs every ```python block of README.md and docs/, each file in one process
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_BLOCK = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(path: Path, language: str) -> list[tuple[str, str]]:
    """(info string, code) of every fenced block of `language` in a Markdown file."""
    return [(i.strip(), code) for lang, i, code in _BLOCK.findall(path.read_text()) if lang == language]


def commands(label: str) -> str:
    """The shell block of README.md marked `{.LABEL}`."""
    found = [code for info, code in blocks(ROOT / "README.md", "bash") if f".{label}" in info]
    if len(found) != 1:
        sys.exit(f"README.md has {len(found)} bash blocks marked .{label}, there must be one")
    return found[0]


def run_blocks() -> int:
    """Run each file's python blocks in order in one process, those marked `.norun` left out; returns the failures."""
    failures = 0
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        code = "\n".join(c for info, c in blocks(path, "python") if ".norun" not in info)
        if not code:
            continue
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True)
        print(f"{'ok  ' if done.returncode == 0 else 'FAIL'} {path.relative_to(ROOT)}")
        if done.returncode:
            failures += 1
            print(done.stdout, done.stderr, sep="\n")
    return failures


if __name__ == "__main__":
    if sys.argv[1:2] == ["commands"]:
        print(commands(sys.argv[2]), end="")
    elif sys.argv[1:2] == ["blocks"]:
        sys.exit(1 if run_blocks() else 0)
    else:
        sys.exit(__doc__)
