"""Every attention class of a package of models: what the fuser makes of it."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from torch import nn

from .attention import AttentionFuser
from .base import ClassFinding, Outcome
from .sinks import SINK_KEYWORDS

_MARKS = ("ALL_ATTENTION_FUNCTIONS", "AttentionInterface")
_SHOWN = {"scaling", *SINK_KEYWORDS, "module", "query", "key", "value", "attention_mask"}


@dataclass(frozen=True)
class ScanRow:
    """One class, or one module that cannot be imported (then `cls` is empty). All fields go into JSON as they are."""

    module: str
    cls: str
    outcome: Outcome
    reason: str
    line: int
    calls: int = 0
    scaling: tuple[str, ...] = ()
    sink: tuple[str, ...] = ()
    keywords: tuple[str, ...] = ()


def scan_modules(package: str = "transformers.models") -> Iterator[ScanRow]:
    """The attention classes of every `modeling_*.py` below `package`, sorted by module and line.

    A class belongs to the module that defines its forward. Only modules whose text names the attention interface are
    imported; one that cannot be imported gives a row with the outcome REFUSED. Raises nothing for a model's own faults.
    """
    fuser = AttentionFuser()
    for name, path in sorted(_modeling_files(package)):
        if not any(mark in path.read_text(encoding="utf-8", errors="replace") for mark in _MARKS):
            continue
        module = _imported(name)
        if isinstance(module, ModuleType):
            yield from _rows(module, fuser)
        else:
            yield ScanRow(name, "", Outcome.REFUSED, f"the module cannot be imported: {module}", 0)


def _modeling_files(package: str) -> Iterator[tuple[str, Path]]:
    spec = importlib.util.find_spec(package)
    for root in (spec.submodule_search_locations or ()) if spec else ():
        for path in Path(root).rglob("modeling_*.py"):
            parts = path.relative_to(root).with_suffix("").parts
            yield ".".join((package, *parts)), path


def _imported(name: str) -> ModuleType | str:
    try:
        return importlib.import_module(name)
    except Exception as error:  # noqa: BLE001 - a model's module may raise anything; it becomes the row's reason
        return f"{type(error).__name__}: {error}"


def _rows(module: ModuleType, fuser: AttentionFuser) -> list[ScanRow]:
    classes = [c for c in vars(module).values() if isinstance(c, type) and issubclass(c, nn.Module)]
    own = {c for c in classes if c.__module__ == module.__name__ and "forward" in vars(c)}
    findings = [fuser.match(cls) for cls in own]
    rows = [_row(finding) for finding in findings if finding.outcome is not Outcome.NONE]
    return sorted(rows, key=lambda row: (row.line, row.cls))


def _row(finding: ClassFinding) -> ScanRow:
    arguments = [argument for call in finding.calls for argument in call.arguments]
    return ScanRow(
        module=finding.cls.__module__,
        cls=finding.cls.__qualname__,
        outcome=finding.outcome,
        reason=finding.reason,
        line=finding.calls[0].line if finding.calls else finding.line,
        calls=len(finding.calls),
        scaling=tuple(dict.fromkeys(a.expression for a in arguments if a.name == "scaling")),
        sink=tuple(dict.fromkeys(f"{a.name}={a.expression}" for a in arguments if a.name in SINK_KEYWORDS)),
        keywords=tuple(sorted({a.name for a in arguments} - _SHOWN)),
    )
