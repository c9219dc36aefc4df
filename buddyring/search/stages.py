"""The stages of the search: structural sequences first, then more and more fillers allowed to split."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from buddyring.search.kernels.beam import beam
from buddyring.search.kernels.fill import complete
from buddyring.search.kernels.objective import EXCESS, KEY, VIOLATION, compare
from buddyring.search.kernels.repair import MOST_MOVES, repair
from buddyring.search.tables import NUM_CLASSES, Tables

STRUCTURAL = 0.5  # kappa from which a sequence is structural
BEAM_WIDTH = 64
GROUPS_PER_SIZE = 8
REFINED = 8  # placements that get local repair


class Stage(NamedTuple):
    """The beam places the first ``count`` sequences on sizes ``allowed`` (``[n, levels]`` bool)."""

    allowed: np.ndarray
    count: int


class Found(NamedTuple):
    """A whole placement: ``[n]`` group codes and its ``[KEY]`` key."""

    codes: np.ndarray
    key: np.ndarray

    @property
    def is_feasible(self) -> bool:
        """Within the capacity and both tolerances."""
        return self.key[EXCESS] == 0 and self.key[VIOLATION] == 0


def better(left: Found, right: Found) -> Found:
    """The better of two placements, the left one when they are equal."""
    return right if compare(right.key, left.key, KEY) < 0 else left


def search(t: Tables) -> Found:
    """The first feasible stage's best placement, else the best of all stages (LiquidCP, section 4.2 and A.1)."""
    best = None
    for stage in stages(t):
        found = run_stage(t, stage)
        best = found if best is None else better(best, found)
        if best.is_feasible:
            break
    return best


def run_stage(t: Tables, stage: Stage) -> Found:
    """Beam, fillers, and local repair of the best few."""
    codes, keys = complete(t, beam(t, stage.allowed, stage.count, BEAM_WIDTH, GROUPS_PER_SIZE))
    order = sorted(range(len(keys)), key=functools.cmp_to_key(lambda a, b: compare(keys[a], keys[b], KEY)))
    refined = [Found(codes[state], keys[state]) for state in order[:REFINED]]
    for found in refined:
        repair(t, found.codes, found.key, MOST_MOVES)
    return functools.reduce(better, refined)


def stages(t: Tables) -> Iterator[Stage]:
    """Structural sequences on at least their minimum size; then fillers too, by length class and size; then all."""
    structural = int(np.count_nonzero(t.kappa() >= STRUCTURAL))
    sizes = 1 << np.arange(t.levels)
    smallest = t.legal.copy()
    smallest &= t.lengths[:, None] / sizes * t.token_scale <= 1 + t.token_tolerance
    smallest &= (t.lengths * (t.lengths + 1) / 2)[:, None] / sizes * t.work_scale <= 1 + t.work_tolerance
    largest = t.levels - 1 - t.legal[:, ::-1].argmax(axis=1)
    minimum = np.where(smallest.any(axis=1), smallest.argmax(axis=1), largest)
    allowed = t.legal & (np.arange(t.levels) >= minimum[:, None])
    allowed[structural:, 1:] = False
    yield Stage(allowed.copy(), structural)
    before = allowed
    for klass in reversed(range(NUM_CLASSES)):
        count = max(structural, int(np.count_nonzero(t.classes >= klass)))
        for level in range(1, t.levels):
            wider = allowed.copy()
            wider[structural:count, : level + 1] = t.legal[structural:count, : level + 1]
            if (wider != before).any():
                yield Stage(wider, count)
            before = wider
        allowed = before
    if (t.legal != before).any():
        yield Stage(t.legal, len(t.lengths))
