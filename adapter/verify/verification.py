"""The outcome of a verification: as objects, as text, as a table and as JSON."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from rich.table import Table

PASS: Literal["pass"] = "pass"
FAIL: Literal["fail"] = "fail"
SKIPPED: Literal["skipped"] = "skipped"
_STYLES = {PASS: "green", FAIL: "bold red", SKIPPED: "dim"}


class Skip(Exception):
    """A probe has nothing to measure here; the text is its reason."""


@dataclass(frozen=True)
class Probe:
    """One property of a model, measured.

    Args:
        name: the property.
        status: 'skipped' where it cannot be measured; `detail` then says why.
        number: greatest error, relative to the greatest value of what was compared; None where nothing was measured.
        limit: greatest number that passes.
        detail: what was compared, or what went wrong.
    """

    name: str
    status: Literal["pass", "fail", "skipped"]
    number: float | None
    limit: float | None
    detail: str


def judge(name: str, number: float, limit: float, detail: str) -> Probe:
    """A probe that passes when `number <= limit`; NaN fails."""
    return Probe(name, PASS if number <= limit else FAIL, number, limit, detail)


@dataclass(frozen=True)
class Verification:
    """What verify found on one model.

    Args:
        model: the model's class.
        adapted: False when the model was adapted for the duration only.
        probes: the eight properties, always in the same order.
        reference: the adapted model's logits against its own eager attention.
    """

    model: str
    adapted: bool
    probes: tuple[Probe, ...]
    reference: Probe

    @property
    def rows(self) -> tuple[Probe, ...]:
        """The reference and the eight probes."""
        return (self.reference, *self.probes)

    @property
    def ok(self) -> bool:
        """True when nothing failed; what was skipped has its reason in `detail`."""
        return all(probe.status != FAIL for probe in self.rows)

    @property
    def failed(self) -> tuple[str, ...]:
        """Names of the rows that failed."""
        return tuple(probe.name for probe in self.rows if probe.status == FAIL)

    def to_dict(self) -> dict[str, Any]:
        """Plain types only; a number that is not finite becomes a string, as JSON has none."""
        found = {"ok": self.ok, **asdict(self)}
        for row in (*found["probes"], found["reference"]):
            if row["number"] is not None and not math.isfinite(row["number"]):
                row["number"] = str(row["number"])
        found["probes"] = list(found["probes"])
        return found

    def to_json(self) -> str:
        """The verification as JSON text."""
        return json.dumps(self.to_dict(), indent=2)

    def __str__(self) -> str:
        width = max(len(probe.name) for probe in self.rows)
        lines = [f"{self._title()}: {'ok' if self.ok else 'FAILED ' + ', '.join(self.failed)}"]
        for p in self.rows:
            lines.append(f"  {p.status:<7}  {p.name:<{width}}  {_measured(p):<18}  {p.detail}")
        return "\n".join(lines)

    def table(self) -> Table:
        """The rows as a rich table."""
        from rich.table import Table
        from rich.text import Text

        table = Table(title=self._title())
        for heading in ("probe", "status", "error / limit", "detail"):
            table.add_column(heading, overflow="fold")
        for p in self.rows:
            # Text and not str: error texts hold square brackets, which rich would take for markup.
            table.add_row(p.name, Text(p.status, style=_STYLES[p.status]), _measured(p), Text(p.detail))
        return table

    def _title(self) -> str:
        return f"{self.model} ({'adapted' if self.adapted else 'adapted for this check only'})"


def _measured(probe: Probe) -> str:
    if probe.number is None:
        return "-"
    return f"{probe.number:.1e} / {probe.limit:.0e}" if probe.limit is not None else f"{probe.number:.1e}"
