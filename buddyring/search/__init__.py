"""The BuddyRing search: LiquidCP, section 4.2 and appendix A.1, for lengths of any kind and with a hard capacity."""

from __future__ import annotations

import numpy as np

from buddyring.placement import CapacityError
from buddyring.problem import Layout, Problem
from buddyring.search.domains import key_of, search_all
from buddyring.search.kernels.objective import EXCESS, KEY
from buddyring.search.kernels.repair import repair
from buddyring.search.stages import Found, better, is_small, moves
from buddyring.search.tables import Tables, build_tables


def buddyring(problem: Problem) -> Layout:
    """The placement that the search finds. Raises CapacityError as ``plan`` says."""
    if not len(problem.lengths):
        return Layout(np.zeros((0, 2), dtype=np.int64))
    order = np.argsort(-problem.lengths, kind="stable")  # equal lengths by index
    t = build_tables(problem, problem.lengths[order])
    if problem.rank_limit is not None:
        check_capacity(problem, t, order)
    found = search_all(t)
    if problem.rank_limit is not None:
        limited = t._replace(limit=float(problem.rank_limit))
        key = key_of(limited, found.codes)
        if key[EXCESS] > 0:  # else what fits unasked is the plan
            found = search_within(problem, limited)
    groups = np.empty((len(order), 2), dtype=np.int64)
    groups[order, 0] = t.start_of[found.codes]
    groups[order, 1] = 1 << t.level_of[found.codes]
    return Layout(groups)


def check_capacity(problem: Problem, t: Tables, order: np.ndarray) -> None:
    """Refuse what no placement can hold: a total over all ranks' capacity, or a sequence over that of its ranks."""
    capacity, limit = problem.capacity, problem.rank_limit
    rounded = "" if limit == capacity else f" (whole multiples of {problem.rank_multiple}: {limit})"
    total = int(problem.lengths.sum())
    if total > problem.ranks * limit:
        raise CapacityError(
            f"{total} tokens do not fit {problem.ranks} ranks of {capacity} tokens each{rounded}; "
            "raise the capacity, plan more ranks or send fewer sequences"
        )
    least = np.full(len(order), np.inf)
    for level in range(t.levels):
        most = t.held[:, (1 << level) - 1 : (2 << level) - 1].max(axis=1)
        least = np.minimum(least, np.where(t.legal[:, level], most, np.inf))
    bad = order[least > limit]
    if len(bad):
        index = int(bad.min())
        raise CapacityError(
            f"sequence {index} of {int(problem.lengths[index])} tokens fits in no group of at most "
            f"{problem.largest_group} ranks of {capacity} tokens each{rounded}; raise the capacity or max_group, "
            "or cut the sequence"
        )


def search_within(problem: Problem, t: Tables) -> Found:
    """The best placement found within the limit of ``t``: by the whole objective, else by tokens alone."""
    found = search_all(t)
    if found.key[EXCESS] > 0 and not is_small(t):
        # without attention work, and with what the limit allows as tolerance, the search packs tokens
        slack = max(0.0, t.limit * t.token_scale - 1)
        packed = search_all(t._replace(work_scale=0.0, work_tolerance=1.0, token_tolerance=slack))
        packed = Found(packed.codes, key_of(t, packed.codes))
        repair(t, packed.codes, packed.key, KEY, moves(t))
        found = better(found, packed)
    if found.key[EXCESS] > 0:
        known = "there is no placement" if is_small(t) else "no placement was found"
        raise CapacityError(
            f"{known} of these {len(t.lengths)} sequences on {problem.ranks} ranks that keeps every rank within "
            f"{problem.capacity} tokens (rounded up to multiples of {problem.rank_multiple}); raise the capacity or "
            "max_group, or plan more ranks"
        )
    return found
