"""Every sequence over as many ranks as there are: what context parallelism does without a scheduler."""

from __future__ import annotations

import numpy as np

from buddyring.problem import Layout, Problem


def uniform(problem: Problem) -> Layout:
    """Each sequence over the largest aligned size, longest first, on the group with the least tokens.

    ``max_group`` does not bind it. A sequence with fewer than ``2 * size`` tokens takes the largest size that it has
    the tokens for (with ``exact_tiles``, the largest legal size).
    """
    tokens = np.zeros(problem.ranks)
    groups = np.empty((len(problem.lengths), 2), dtype=np.int64)
    for index in np.argsort(-problem.lengths, kind="stable").tolist():
        length = problem.lengths[index : index + 1]
        size = problem.largest_divisor
        while size > 1 and not (problem.is_legal(length, size)[0] if problem.exact_tiles else length[0] >= 2 * size):
            size //= 2
        start = int(tokens.reshape(-1, size).sum(axis=1).argmin()) * size
        tokens[start : start + size] += length[0] / size
        groups[index] = start, size
    return Layout(groups)
