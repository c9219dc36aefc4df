"""Zeppelin's partitioning inside a node (its algorithm 2), as a baseline."""

from __future__ import annotations

import heapq

import numpy as np

from buddyring.problem import Layout, Problem

MOST_PASSES = 64  # of lowering the threshold between long and short sequences


def zeppelin(problem: Problem) -> Layout:
    """Long sequences on ranks in proportion to their squared length, short ones packed whole.

    Sequences longer than a threshold are long; at first the threshold is what a rank may hold: its capacity, or
    without one its share of the tokens. Each long one gets its share of the ranks, by squared length among the long,
    rounded up to an aligned legal size, on the ranks with the least work. The others go whole, longest first, to the
    rank with the fewest tokens. When one of them overfills its rank, the threshold falls below the longest of them and
    everything is placed again. ``max_group`` does not bind it.
    """
    limit = problem.rank_limit
    if limit is None:
        limit = -(-int(problem.lengths.sum()) // problem.ranks)
    order = np.argsort(-problem.lengths, kind="stable")
    threshold = limit
    for _ in range(MOST_PASSES):
        num_long = int(np.count_nonzero(problem.lengths > threshold))
        groups, overfull = _place(problem, order, num_long, limit)
        if not overfull:
            break
        longest_short = int(problem.lengths[order[num_long]])
        if longest_short <= 2 * problem.tile:  # too short to be split by tiles: no lower threshold changes anything
            break
        threshold = longest_short - 1
    return Layout(groups)


def _place(problem: Problem, order: np.ndarray, num_long: int, limit: float) -> tuple[np.ndarray, bool]:
    """Groups of all sequences, the first ``num_long`` of ``order`` being long, and whether a short one overfilled."""
    groups = np.ones((len(order), 2), dtype=np.int64)
    lengths = problem.lengths[order].astype(np.float64)
    tokens, work = np.zeros(problem.ranks), np.zeros(problem.ranks)
    shares = lengths[:num_long] ** 2 * problem.ranks / max((lengths[:num_long] ** 2).sum(), 1.0)
    for position in range(num_long):
        size = 1
        while (
            size < min(shares[position], problem.largest_divisor)
            and problem.is_legal(problem.lengths[order[position : position + 1]], 2 * size)[0]
        ):
            size *= 2
        start = int(work.reshape(-1, size).sum(axis=1).argmin()) * size
        tokens[start : start + size] += lengths[position] / size
        work[start : start + size] += lengths[position] ** 2 / size
        groups[order[position]] = start, size
    ranks = [(float(held), rank) for rank, held in enumerate(tokens)]
    heapq.heapify(ranks)
    overfull = False
    for position in range(num_long, len(order)):
        held, rank = ranks[0]
        held += lengths[position]
        overfull = overfull or held > limit
        heapq.heapreplace(ranks, (held, rank))
        groups[order[position], 0] = rank
    return groups, overfull
