"""The BuddyRing search."""

from __future__ import annotations

import numpy as np

from buddyring.problem import Layout, Problem
from buddyring.search.kernels.exact import decide
from buddyring.search.stages import search
from buddyring.search.tables import build_tables


def buddyring(problem: Problem) -> Layout:
    order = np.argsort(-problem.lengths, kind="stable")
    if not len(order):
        return Layout(np.zeros((0, 2), int))
    t = build_tables(problem, problem.lengths[order])
    best = search(t)
    done = decide(t, best[0], best[1], 300000 if t.legal.shape[0] <= 6 else 1000)
    groups = np.empty((len(order), 2), dtype=np.int64)
    groups[order, 0] = t.start_of[best[0]]
    groups[order, 1] = 1 << t.level_of[best[0]]
    return Layout(groups)
