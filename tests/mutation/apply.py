"""Runs the project with a piece of its source changed, in memory: the code of live functions is exchanged."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

from adapter.backends import proof, registry


@dataclass(frozen=True)
class Mutant:
    """A fault in the path of the sink or of what a query may see.

    Args:
        name: what is wrong then.
        file: where, from the repository's root.
        old: the text to replace; it must stand there exactly once.
        new: what it becomes.
        checks: the checks of which at least one must fail.
    """

    name: str
    file: str
    old: str
    new: str
    checks: tuple[str, ...]


def faults(file: str, old: str, checks: list[str], new: dict[str, str]) -> list[Mutant]:
    """Mutants of one place: by name, what its text becomes."""
    return [Mutant(name, file, old, text, tuple(checks)) for name, text in new.items()]


class StaleMutant(AssertionError):
    """The text of a mutant is not in the source any more, or changing it changes no function."""


def codes(code: CodeType, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], CodeType]]:
    """Every function and class body below a module's code with its path of names."""
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield (*path, inner.co_name), inner
            if not inner.co_flags & 0x2:  # no fast locals: the body of a class, whose functions can be reached too
                yield from codes(inner, (*path, inner.co_name))


def live_function(module: Any, path: tuple[str, ...]) -> FunctionType | None:
    """The function that the module now uses under a path of names."""
    found: Any = module
    for name in path:
        found = vars(found).get(name)
        if found is None:
            return None
    found = getattr(found, "fget", found)
    found = getattr(found, "__func__", found)
    return found if isinstance(found, FunctionType) else None


@contextmanager
def mutated(mutant: Mutant) -> Iterator[None]:
    """The project with the fault in it, and no proof or selection left from before.

    Raises:
        StaleMutant: the list of mutants does not fit the source.
    """
    path = Path(importlib.import_module(mutant.file.split("/")[0]).__file__ or "").parent.parent / mutant.file
    source = path.read_text(encoding="utf-8")
    if source.count(mutant.old) != 1:
        raise StaleMutant(f"{mutant.name}: {source.count(mutant.old)} places in {mutant.file} read {mutant.old!r}")
    module = importlib.import_module(mutant.file.removesuffix(".py").replace("/", "."))
    before = dict(codes(compile(source, str(path), "exec", dont_inherit=True)))
    after = dict(codes(compile(source.replace(mutant.old, mutant.new), str(path), "exec", dont_inherit=True)))
    changed = [(live_function(module, where), code) for where, code in after.items() if code != before.get(where)]
    targets = [(function, code) for function, code in changed if function is not None]
    if not targets:
        raise StaleMutant(f"{mutant.name}: no function of {mutant.file} changes")
    saved = [(function, function.__code__, dict(function.__dict__)) for function, _ in targets]
    memories = [(memory, dict(memory)) for memory in (registry._selected, proof._outcomes)]
    try:
        for memory, _ in memories:
            memory.clear()
        for function, code in targets:
            function.__code__ = code
        yield
    finally:
        for function, code, attributes in saved:
            function.__code__ = code
            function.__dict__.clear()
            function.__dict__.update(attributes)
        for memory, content in memories:
            memory.clear()
            memory.update(content)
