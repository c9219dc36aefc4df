"""The BuddyRing search."""

from __future__ import annotations

import numpy as np

from buddyring.problem import Layout, Problem


def buddyring(problem: Problem) -> Layout:
    """Smallest size that keeps a sequence within the tolerances, longest first, on the least loaded such group."""
    lengths = problem.lengths.astype(float)
    work = lengths * (lengths + 1) / 2
    limits = [
        (1 + problem.token_tolerance) * lengths.sum() / problem.ranks,
        (1 + problem.attention_tolerance) * work.sum() / problem.ranks,
    ]
    loads = np.zeros((2, problem.ranks))
    groups = np.empty((len(lengths), 2), dtype=np.int64)
    for index in np.argsort(-problem.lengths, kind="stable").tolist():
        size, mine = 1, np.array([lengths[index], work[index]])
        while size < problem.largest_group and (mine / size > limits).any():
            if not problem.is_legal(problem.lengths[index : index + 1], 2 * size)[0]:
                break
            size *= 2
        after = loads.reshape(2, -1, size).max(axis=2) + (mine / size)[:, None]
        start = int((after / np.asarray(limits)[:, None]).max(axis=0).argmin()) * size
        loads[:, start : start + size] += (mine / size)[:, None]
        groups[index] = start, size
    return Layout(groups)
