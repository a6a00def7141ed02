"""Every fault of tensor and context parallelism is found by a check that passes without it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from adapter.parallel import start_ranks
from tests.families import INSTALLED, save
from tests.parallel.ranks import run_ranks
from tests.parallel.support import needs_local_params

from .apply import mutated
from .mutants_of_parallel import MUTANTS
from .parallel_checks import CHECKS, RANKS, SMALL, on_ranks
from .test_mutants import BROKEN

pytestmark = [needs_local_params, pytest.mark.skipif(not SMALL.keys() <= set(INSTALLED), reason="families are missing")]

ALONE = [mutant for mutant in MUTANTS if mutant.checks[0] in CHECKS]
TOGETHER = [mutant for mutant in MUTANTS if mutant.checks[0] not in CHECKS]


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_the_project_passes(check):
    torch.manual_seed(0)
    check()


def is_killed(mutant, checks):
    """Whether one of the mutant's checks fails in this process."""
    with mutated(mutant):
        for check in [checks[name] for name in mutant.checks]:
            torch.manual_seed(0)
            try:
                check()
            except BROKEN:
                raise
            except (Exception, pytest.fail.Exception):  # noqa: BLE001 - any error tells the fault from the project
                return True
    return False


@pytest.mark.parametrize("mutant", ALONE, ids=lambda m: m.name)
def test_killed(mutant):
    assert is_killed(mutant, CHECKS)


def killed_here(mutants, folders):
    """On a rank: the names of the mutants that this rank's checks have found; all pass before and after them."""
    start_ranks()
    checks, found = on_ranks(folders), set()
    for check in checks.values():
        check()
    for mutant in mutants:
        if is_killed(mutant, checks):
            found.add(mutant.name)
        dist.barrier()
    for name in ("tensor parallel gpt_oss", "ring"):
        checks[name]()
    return found


def test_killed_on_several_ranks(tmp_path):
    for name, overrides in SMALL.items():
        save(name, tmp_path / name, **overrides)
    folders = {name: str(tmp_path / name) for name in SMALL}
    killed = set().union(*run_ranks(RANKS, killed_here, TOGETHER, folders))
    assert {mutant.name for mutant in TOGETHER} - killed == set()


def test_there_are_enough_and_none_twice():
    assert len(MUTANTS) >= 50
    assert len({m.name for m in MUTANTS}) == len({(m.file, m.old, m.new) for m in MUTANTS}) == len(MUTANTS)
