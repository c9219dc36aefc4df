"""The stages of the search: structural sequences first, then more and more fillers allowed to split."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from buddyring.search.bounds import least_violation
from buddyring.search.kernels.beam import beam
from buddyring.search.kernels.exact import decide
from buddyring.search.kernels.fill import complete
from buddyring.search.kernels.objective import DISTINCT, EXCESS, KEY, VIOLATION, compare, evaluate
from buddyring.search.kernels.relieve import relieve
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
EASE_STEPS = 3  # placements made with wider tolerances
RELIEF_TRIED = 300_000  # changes that relief looks at, some 2 ms
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
    on from the best placement, over the structural sequences first, then over more. And as a violation may be forced
    (``least_violation``), reaching that counts as feasible; when even that is not reached, ``ease`` looks for less.
    """
    plan_stages = stages(t)
    best = run_stage(t, next(plan_stages))
    if is_small(t):
        decide(t, best.codes, best.key, len(t.lengths), t.even, EXACT_NODES)
        return best
    least = 0.0 if is_done(best, 0.0) else least_violation(t)
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
    best = ease(t, best, least)
    repair(t, best.codes, best.key, KEY, moves(t))
    return best


def key_of(t: Tables, codes: np.ndarray) -> np.ndarray:
    """``[KEY]``: the key of a whole placement."""
    key = np.empty(KEY)
    evaluate(t, codes, np.empty(t.ranks), np.empty(t.ranks), np.empty(len(t.level_of), dtype=np.int64), key)
    return key


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


def run_stage(t: Tables, stage: Stage) -> Found:
    """Beam, fillers, and local repair of the best few."""
    refined = drafts(t, stage)[: max(2, REFINED // max(1, t.ranks // SMALL_RANKS))]
    for found in refined:
        repair(t, found.codes, found.key, DISTINCT, moves(t))
    return functools.reduce(better, refined)


def drafts(t: Tables, stage: Stage) -> list[Found]:
    """Beam and fillers: placements without repair, the best first."""
    share = max(1, t.ranks // SMALL_RANKS)
    width = BEAM_WIDTH * LONG_BEAM // max(LONG_BEAM, stage.count)
    heads = beam(t, stage.allowed, stage.count, max(8, width // share), SMALL_RANKS if share < 4 else 4)
    codes, keys = complete(t, heads)
    return [Found(codes[state], keys[state]) for state in np.lexsort(keys.T[::-1])]


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


def ease(t: Tables, best: Found, least: float) -> Found:
    """A placement with less violation, when ``best`` has more than ``least``, the least that is known to be forced.

    Fillers keep off a rank that is overloaded, however few tokens it has. Where a long sequence must overload its
    ranks, they so end up short of tokens. With tolerances wider by what is unavoidable they get their share; that is
    sought by halving between ``least`` and the best violation so far. ``relieve`` improves each placement.
    """
    low = least
    for step in range(EASE_STEPS + 1):
        if best.key[EXCESS] > 0 or best.key[VIOLATION] <= low:
            break
        codes, wider = best.codes.copy(), least
        if step > 0:
            wider = (low + best.key[VIOLATION]) / 2
            eased = t._replace(token_tolerance=t.token_tolerance + wider, work_tolerance=t.work_tolerance + wider)
            codes = drafts(eased, next(stages(t)))[0].codes
            best = better(best, Found(codes.copy(), key_of(t, codes)))
        relieve(t, codes, RELIEF_TRIED)
        best = better(best, Found(codes, key_of(t, codes)))
        if best.key[VIOLATION] > wider:
            low = wider
    return best


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
