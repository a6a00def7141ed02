"""The base of every error of the project, and the faults of reading a model's source."""

from __future__ import annotations

from typing import ClassVar


class SinkholdError(Exception):
    """An error that says what happened, where, why it matters and how to mend it.

    Args:
        what: one sentence, what happened.
        where: module path, class, file:line or expression; empty when there is no place.
        why: what would go wrong if this were let through; defaults to the class's own reason.
        fix: what to do about it; defaults to the class's own remedy.
    """

    code: ClassVar[str] = "SINK-000"
    default_why: ClassVar[str] = ""
    default_fix: ClassVar[str] = ""

    def __init__(self, what: str, *, where: str = "", why: str = "", fix: str = "") -> None:
        self.what = what
        self.where = where
        self.why = why or self.default_why
        self.fix = fix or self.default_fix
        super().__init__(what)

    def __str__(self) -> str:
        lines = [f"[{self.code}] {self.what}"]
        for label, text in (("where", self.where), ("why", self.why), ("fix", self.fix)):
            if text:
                lines.append(f"  {label + ':':<6} {text}")
        return "\n".join(lines)

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.what, self.where, self.why, self.fix))


def _rebuild(cls: type[SinkholdError], what: str, where: str, why: str, fix: str) -> SinkholdError:
    return cls(what, where=where, why=why, fix=fix)


class SourceError(SinkholdError):
    """The source of an attention's forward cannot be read or parsed."""

    code = "SINK-101"
    default_why = "what cannot be read may hold a sink; taking it for 'no sink' would drop it in silence"
    default_fix = "install the model's source file beside its bytecode, or run the model without the adapter"


class ResolveError(SinkholdError):
    """An expression of an attention's interface call has no value that can be found without running it."""

    code = "SINK-102"
    default_why = "a guessed scale or sink gives plausible but wrong text"
    default_fix = "pass a constant, an attribute of self or of its config, or a parameter in the interface call"


class RefusedError(SinkholdError):
    """An attention whose way of calling the interface has no meaning that the adapter implements."""

    code = "SINK-103"
    default_why = "the adapter would have to guess what the model means"
    default_fix = "run this model without the adapter, and report the class"
