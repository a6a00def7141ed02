"""Every fault of the list is found by a check that passes without it."""

from __future__ import annotations

import pytest
import torch

from .apply import Mutant, StaleMutant, mutated
from .checks import CHECKS
from .mutants import MUTANTS
from .mutants_of_eager import EAGER

BROKEN = (NameError, ImportError, SyntaxError, UnboundLocalError)
"""Errors of a mutant that is no Python any more, rather than wrong."""


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_the_project_passes(check):
    torch.manual_seed(0)
    check()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_killed(mutant):
    assert survived(mutant) is None


def survived(mutant):
    """None when one of the mutant's checks fails, else what they let through."""
    with mutated(mutant):
        for name in mutant.checks:
            torch.manual_seed(0)
            try:
                CHECKS[name]()
            except BROKEN:
                raise
            except (Exception, pytest.fail.Exception):  # noqa: BLE001 - any error tells the fault from the project
                return None
    return f"{mutant.name!r} passes {', '.join(mutant.checks)}"


def test_there_are_enough_and_none_twice():
    assert len(MUTANTS) >= 40
    assert len({m.name for m in MUTANTS}) == len(MUTANTS)
    assert len({(m.file, m.old, m.new) for m in MUTANTS}) == len(MUTANTS)


def test_a_change_without_effect_survives():
    idle = Mutant("nothing", EAGER, "if call.sinks is not None:", "if not (call.sinks is None):", ("eager",))
    assert survived(idle) == "'nothing' passes eager"


@pytest.mark.parametrize("old", ["this line is gone", "torch"])
def test_a_mutant_that_no_longer_fits_fails(old):
    with pytest.raises(StaleMutant), mutated(Mutant("stale", EAGER, old, "x", ("eager",))):
        pass


def test_a_mutant_that_changes_no_function_fails():
    with (
        pytest.raises(StaleMutant, match="no function"),
        mutated(Mutant("outside", EAGER, "BACKEND = Eager()", "BACKEND = None", ("eager",))),
    ):
        pass


def test_the_project_is_back_afterwards():
    with mutated(MUTANTS[0]), pytest.raises(AssertionError):
        CHECKS["eager"]()
    CHECKS["eager"]()
