"""Writes the tables of README.md and docs/ from the code, between `<!-- table NAME -->` and `<!-- end -->`.

python docs/tables.py            write them
python docs/tables.py --check    exit with 1 when one is out of date
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import transformers

import adapter
import fusers
from adapter.backends import registry
from adapter.backends.capability import Feature
from adapter.cli.tiny import entries, write
from adapter.errors import SinkholdError
from fusers.base import Outcome
from fusers.scan import scan_modules

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("README.md", "docs/backends.md", "docs/errors.md", "docs/families.md")
_MARKED = re.compile(r"(<!-- table (\w+)[^\n]*-->\n)(.*?)(<!-- end -->)", re.DOTALL)
_SINKS = Feature.SINK_PER_HEAD | Feature.SINK_PER_TOKEN


def families() -> str:
    """Every model family of the installed transformers whose attention passes a sink."""
    rows = []
    for package in _packages_with_sinks():
        found = [r for r in scan_modules(package) if r.sink and r.outcome is not Outcome.REFUSED]
        for row in found:
            kind = "from the source" if row.outcome is Outcome.RESOLVED else "at the first call"
            sink, scale = " or ".join(row.sink), " or ".join(row.scaling)
            name = row.module.split(".")[2]
            rows.append(f"| {name} | `{row.cls}` | `{sink}` | `{scale}` | {kind} |\n")
    head = "| family | attention class | sink that it passes | scale that it passes | known |\n|---|---|---|---|---|\n"
    return head + "".join(rows)


def _packages_with_sinks() -> Iterator[str]:
    folder = Path(str(transformers.__file__)).parent / "models"
    for file in sorted(folder.glob("*/modeling_*.py")):
        if re.search(r"\b(s_aux|sinks)\s*=", file.read_text(encoding="utf-8")):
            yield f"transformers.models.{file.parent.name}"


def backends() -> str:
    """What each backend of the project can do, in the order in which `auto` tries them."""
    head = "| backend | devices | dtypes | sinks | cannot |\n|---|---|---|---|---|\n"
    return head + "".join(_backend_row(name) for name in shipped_backends())


def shipped_backends() -> list[str]:
    """The names of the project's own backends, in the order in which `auto` tries them."""
    return [n for n in registry.names() if importlib.util.find_spec(f"adapter.backends.{n}") is not None]


def _backend_row(name: str) -> str:
    capability = registry.get(name).capability
    dtypes = ", ".join(sorted((str(d).removeprefix("torch.") for d in capability.dtypes), key=_width))
    sinks = ", ".join(n.removeprefix("sink ") for n in (capability.features & _SINKS).names()) or "none"
    cannot = ", ".join((~capability.features & ~_SINKS).names()) or "-"
    devices = ", ".join(sorted(capability.devices))
    return f"| `{name}` | {devices} | {dtypes} | {sinks} | {cannot} |\n"


def _width(dtype: str) -> tuple[int, str]:
    return int(re.sub(r"\D", "", dtype.split("_")[0]) or 0), dtype


def errors() -> str:
    """Every error code."""
    rows = [
        f"| {cls.code} | `{cls.__name__}` | {_sentence(cls)} | {cls.default_why or '-'} | {cls.default_fix or '-'} |\n"
        for cls in error_classes()
    ]
    return (
        "| code | class | what happened | why it is not let through | what to do |\n|---|---|---|---|---|\n"
        + "".join(rows)
    )


def error_classes() -> list[type[SinkholdError]]:
    """Every subclass of SinkholdError in the project, by code."""
    for package in (adapter, fusers):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not module.name.endswith("__main__") and ".kernels." not in module.name:
                _try_import(module.name)
    own = [cls for cls in _subclasses(SinkholdError) if cls.__module__.partition(".")[0] in ("adapter", "fusers")]
    return sorted(own, key=lambda cls: (cls.code, cls.__name__))


def _try_import(name: str) -> None:
    try:
        importlib.import_module(name)
    except ImportError as error:
        # A backend of a package that is not installed defines no error class of its own.
        print(f"left out: {name}: {error}", file=sys.stderr)


def _subclasses(cls: type[SinkholdError]) -> Iterator[type[SinkholdError]]:
    for sub in cls.__subclasses__():
        yield sub
        yield from _subclasses(sub)


def _sentence(cls: type) -> str:
    return (cls.__doc__ or "").strip().split("\n\n")[0].replace("\n", " ")


def report() -> str:
    """The report of a tiny model, run on the CPU."""
    tiny = entries()[0]
    with tempfile.TemporaryDirectory() as folder:
        write(tiny, Path(folder))
        model = adapter.AutoModelForCausalLM.from_pretrained(folder)
        model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=2, do_sample=False)
    return f"```text\n{adapter.report(model)}\n```\n"


def versions() -> str:
    """What the tables were made with."""
    return f"Made with transformers {transformers.__version__}.\n"


TABLES: dict[str, Callable[[], str]] = {
    "families": families,
    "backends": backends,
    "errors": errors,
    "report": report,
    "versions": versions,
}


def filled(text: str) -> str:
    """The page with every marked table written anew."""
    return _MARKED.sub(lambda m: f"{m[1]}{TABLES[m[2]]()}{m[4]}", text)


def stale() -> list[str]:
    """The pages that differ from what the code says."""
    return [page for page in PAGES if (text := (ROOT / page).read_text()) != filled(text)]


def main() -> int:
    """Write the pages, or check them."""
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    if "--check" in sys.argv[1:]:
        found = stale()
        for page in found:
            print(f"{page} is out of date: run python docs/tables.py")
        return 1 if found else 0
    for page in stale():
        (ROOT / page).write_text(filled((ROOT / page).read_text()))
        print(f"wrote {page}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
