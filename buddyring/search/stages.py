"""The stages of the search: structural sequences first, then more and more fillers allowed to split."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from buddyring.search.kernels.beam import beam
from buddyring.search.kernels.exact import decide
from buddyring.search.kernels.fill import complete
from buddyring.search.kernels.objective import DISTINCT, EXCESS, KEY, VIOLATION, compare
from buddyring.search.kernels.repair import repair
from buddyring.search.tables import NUM_CLASSES, Tables

STRUCTURAL = 0.5  # kappa from which a sequence is structural
SMALL_RANKS = 8  # the paper's settings hold up to here; more ranks get less effort each, so that time stays in bounds
BEAM_WIDTH = 64
LONG_BEAM = 32  # sequences; a beam over more of them is narrower, so that no stage takes long
REFINED = 8  # placements that get local repair
REPAIR_MOVES = 32
SMALL_PLACEMENTS = 1 << 18  # steps with no more placements than this are decided exactly
EXACT_NODES = 1 << 20  # more than those steps can take
DEEPEN_NODES = 10_000  # some 2 ms on 8 ranks
DEEPEN_FROM = (0.5, 0.3, 0.2, 0.1, 0.05, 0.0)  # kappa of the shortest sequence that is searched


class Stage(NamedTuple):
    """The beam places the first ``count`` sequences on sizes ``allowed`` (``[n, levels]`` bool)."""

    allowed: np.ndarray
    count: int


class Found(NamedTuple):
    """A whole placement: ``[n]`` group codes and its ``[KEY]`` key."""

    codes: np.ndarray
    key: np.ndarray


def better(left: Found, right: Found) -> Found:
    """The better of two placements, the left one when they are equal."""
    return right if compare(right.key, left.key, KEY) < 0 else left


def search(t: Tables) -> Found:
    """The best placement found of a rank domain.

    The stages of LiquidCP (section 4.2 and appendix A.1) with three additions, which find placements that split fewer
    short sequences in less time. Steps with few placements are decided by branch and bound. Otherwise, when the first
    stage is not feasible, whole length classes are split as widely as they can be (repair then shrinks what it can)
    before fillers enter the beam; and branch and bound, with fillers placed as ever and a budget of nodes, searches
    on from the best placement, over the structural sequences first, then over more. And as a violation may be due to
    one sequence alone (``least_violation``), reaching that counts as feasible.
    """
    least = least_violation(t)
    plan_stages = stages(t)
    best = run_stage(t, next(plan_stages))
    if is_small(t):
        decide(t, best.codes, best.key, len(t.lengths), t.even, EXACT_NODES)
        return best
    for stage in wide_stages(t):
        if is_done(best, least):
            break
        best = better(best, run_stage(t, stage))
    deepen(t, best)
    if t.ranks <= SMALL_RANKS:
        for stage in plan_stages:
            if is_done(best, least):
                break
            best = better(best, run_stage(t, stage))
    repair(t, best.codes, best.key, KEY, moves(t))
    return best


def is_done(found: Found, least: float) -> bool:
    """Whether a placement fits the capacity and has no more violation than it must."""
    return found.key[EXCESS] == 0 and found.key[VIOLATION] <= least


def is_small(t: Tables) -> bool:
    """Whether there are so few placements that trying them all is quick."""
    groups = (t.legal * (t.ranks >> np.arange(t.levels))).sum(axis=1)
    return bool(np.log(groups).sum() <= np.log(SMALL_PLACEMENTS))


def moves(t: Tables) -> int:
    """Most moves of one local repair: more ranks need more of them."""
    return REPAIR_MOVES * max(1, t.ranks // SMALL_RANKS)


def least_violation(t: Tables) -> float:
    """What no placement is below: the violation of a rank that holds its share of one sequence and nothing else."""
    least = np.full(len(t.lengths), np.inf)
    for level in range(t.levels):
        places = slice((1 << level) - 1, (2 << level) - 1)
        over = np.maximum(
            t.held[:, places].max(axis=1) * t.token_scale - 1 - t.token_tolerance,
            t.work[:, places].max(axis=1) * t.work_scale - 1 - t.work_tolerance,
        )
        least = np.minimum(least, np.where(t.legal[:, level], over, np.inf))
    return max(0.0, float(least.max())) * (1 + 1e-9)


def run_stage(t: Tables, stage: Stage) -> Found:
    """Beam, fillers, and local repair of the best few."""
    share = max(1, t.ranks // SMALL_RANKS)
    width = BEAM_WIDTH * LONG_BEAM // max(LONG_BEAM, stage.count)
    heads = beam(t, stage.allowed, stage.count, max(8, width // share), SMALL_RANKS if share < 4 else 4)
    codes, keys = complete(t, heads)
    refined = [Found(codes[state], keys[state]) for state in np.lexsort(keys.T[::-1])[: max(2, REFINED // share)]]
    for found in refined:
        repair(t, found.codes, found.key, DISTINCT, moves(t))
    return functools.reduce(better, refined)


def deepen(t: Tables, best: Found) -> None:
    """Branch and bound from ``best``, changed in place, over more and more of the longest sequences."""
    if t.ranks > 2 * SMALL_RANKS:
        return  # the first sequence that was placed badly is never reached again within the budget
    kappa, left, before = t.kappa(), DEEPEN_NODES, 0
    for least in DEEPEN_FROM:
        count = int(np.count_nonzero(kappa >= least))
        if left > 0 and count > before:
            left = decide(t, best.codes, best.key, count, True, left)
        before = count


def wide_stages(t: Tables) -> Iterator[Stage]:
    """Length classes, longest first, each sequence over the most ranks that it legally can be.

    On many ranks only while there are fewer sequences than ranks: beyond that it takes long and rarely helps.
    """
    largest = t.levels - 1 - t.legal[:, ::-1].argmax(axis=1)
    allowed = np.arange(t.levels) == largest[:, None]
    before = 0
    for klass in reversed(range(NUM_CLASSES)):
        count = int(np.count_nonzero(t.classes >= klass))
        if count > before and (t.ranks <= SMALL_RANKS or 4 * count <= 3 * t.ranks):
            yield Stage(allowed, count)
        before = count


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
