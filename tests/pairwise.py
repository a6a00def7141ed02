"""Few configurations that hold every pair of values: a greedy choice, the same on every run."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations, product
from typing import Any

Row = dict[str, Any]


def pairs_of(row: Row) -> set[tuple[tuple[str, Any], tuple[str, Any]]]:
    """Each two axes of a row with their values."""
    return set(combinations(row.items(), 2))


def possible(axes: dict[str, tuple[Any, ...]], obstacle: Callable[[Row], str | None]) -> list[Row]:
    """Every combination of values that has no obstacle."""
    rows = (dict(zip(axes, values, strict=True)) for values in product(*axes.values()))
    return [row for row in rows if obstacle(row) is None]


def covering(rows: list[Row], at_least: int) -> list[Row]:
    """Rows that hold every pair that any of `rows` holds, filled up to `at_least` with others, evenly spread."""
    numbers: dict[Any, int] = {}
    masks = [sum(1 << numbers.setdefault(pair, len(numbers)) for pair in pairs_of(row)) for row in rows]
    missing, chosen = (1 << len(numbers)) - 1, []
    while missing:
        best = max(range(len(rows)), key=lambda i: ((masks[i] & missing).bit_count(), -i))
        chosen.append(best)
        missing &= ~masks[best]
    others = [i for i in range(len(rows)) if i not in set(chosen)]
    wanted = max(0, at_least - len(chosen))
    chosen += [others[i * len(others) // wanted] for i in range(wanted)]
    return [rows[i] for i in chosen]
