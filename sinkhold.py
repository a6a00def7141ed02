"""The command `sinkhold`, under a name that no other package has: it makes sure that `adapter` is this project's."""

from __future__ import annotations

import importlib.util
from pathlib import Path


def _own_adapter() -> None:
    here = Path(__file__).resolve().parent
    spec = importlib.util.find_spec("adapter")
    folders = [Path(p).resolve() for p in (spec.submodule_search_locations or ())] if spec is not None else []
    if any((folder / "_identity.py").is_file() for folder in folders):
        return
    found = (spec.origin or ", ".join(map(str, folders))) if spec is not None else "nothing"
    raise ImportError(
        f"sinkhold needs its own package 'adapter' beside {here}, but Python finds {found}. Rename or move what is in "
        "the way, start Python from another folder, or uninstall the package it belongs to (pip uninstall NAME), then "
        "install sinkhold again."
    )


def main() -> None:
    """Run the command line."""
    _own_adapter()
    from adapter.cli import main as run

    run()


if __name__ == "__main__":
    main()
