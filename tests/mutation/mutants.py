"""All faults: each must be found by the checks that it names."""

from __future__ import annotations

from . import mutants_of_eager, mutants_of_guard, mutants_of_masks, mutants_of_sdpa, mutants_of_translation

_ROOMS = (mutants_of_eager, mutants_of_sdpa, mutants_of_masks, mutants_of_translation, mutants_of_guard)
MUTANTS = tuple(mutant for room in _ROOMS for mutant in room.MUTANTS)
