"""No splitting: the balance that whole sequences alone can reach."""

from __future__ import annotations

import heapq

import numpy as np

from buddyring.problem import Layout, Problem


def local(problem: Problem) -> Layout:
    """Whole sequences, longest first, each to the rank with the least attention work (then the lower rank)."""
    groups = np.ones((len(problem.lengths), 2), dtype=np.int64)
    ranks = [(0, rank) for rank in range(problem.ranks)]  # (attention work, rank): a heap already
    for index in np.argsort(-problem.lengths, kind="stable").tolist():
        length = int(problem.lengths[index])
        work, rank = ranks[0]
        heapq.heapreplace(ranks, (work + length * (length + 1) // 2, rank))
        groups[index, 0] = rank
    return Layout(groups)
