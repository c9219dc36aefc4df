"""What the search knows of a step: arrays for the kernels, longest sequence first."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from buddyring.placement import CLASS_CUTS
from buddyring.problem import Problem
from buddyring.zigzag import place_loads

NUM_CLASSES = len(CLASS_CUTS) + 1


class Tables(NamedTuple):
    """Sequences of one rank domain, longest first (which is also descending kappa: it grows with the length).

    A group is coded ``offsets[level] + start / size`` with ``size = 2**level``; ``level_of`` and ``start_of`` decode.
    Loads are float64: whole numbers below 2**53, so sums of them are exact.

    ranks: of the domain. levels: number of group sizes. offsets: ``[levels + 1]``. level_of, start_of: ``[codes]``.
    lengths: ``[n]`` tokens. classes: ``[n]`` length class, 0 the shortest.
    held, work: ``[n, 2**levels - 1]`` tokens and query-key pairs of place ``p`` of a group, at ``size - 1 + p``.
    legal: ``[n, levels]``. even: whether all places of every legal group hold the same loads.
    token_scale, work_scale: 1 / mean load of a rank (of all ranks, not only of the domain's).
    token_tolerance, work_tolerance: as ``plan`` takes them. limit: most tokens of a rank, infinity without capacity.
    """

    ranks: int
    levels: int
    offsets: np.ndarray
    level_of: np.ndarray
    start_of: np.ndarray
    lengths: np.ndarray
    classes: np.ndarray
    held: np.ndarray
    work: np.ndarray
    legal: np.ndarray
    even: bool
    token_scale: float
    work_scale: float
    token_tolerance: float
    work_tolerance: float
    limit: float

    def kappa(self) -> np.ndarray:
        """``[n]``: the larger share of a mean rank's tokens or work that a sequence is (LiquidCP, section 4.2)."""
        work = self.lengths * (self.lengths + 1) / 2
        return np.maximum(self.lengths * self.token_scale, work * self.work_scale)


def build_tables(problem: Problem, lengths: np.ndarray) -> Tables:
    """Tables of all sequences on all ranks, without a capacity. lengths: ``[n]`` int64, longest first, not empty."""
    levels = problem.largest_group.bit_length()
    offsets, level_of, start_of = code_arrays(problem.ranks, levels)
    legal = np.stack([problem.is_legal(lengths, 1 << level) for level in range(levels)], axis=1)
    held = np.zeros((len(lengths), 2**levels - 1))
    work = np.zeros_like(held)
    for level in range(levels):
        size, rows = 1 << level, np.flatnonzero(legal[:, level])
        held[rows, size - 1 : 2 * size - 1], work[rows, size - 1 : 2 * size - 1] = place_loads(
            lengths[rows], size, problem.tile
        )
    total, total_work = float(lengths.sum()), float((lengths.astype(np.float64) * (lengths + 1) / 2).sum())
    return Tables(
        ranks=problem.ranks,
        levels=levels,
        offsets=offsets,
        level_of=level_of,
        start_of=start_of,
        lengths=lengths.astype(np.float64),
        classes=np.searchsorted(CLASS_CUTS, lengths, side="left").astype(np.int64),
        held=held,
        work=work,
        legal=legal,
        even=problem.exact_tiles,
        token_scale=problem.ranks / total,
        work_scale=problem.ranks / total_work,
        token_tolerance=problem.token_tolerance,
        work_tolerance=problem.attention_tolerance,
        limit=np.inf,
    )


def code_arrays(ranks: int, levels: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """``offsets``, ``level_of`` and ``start_of`` of ``Tables``."""
    counts = [ranks >> level for level in range(levels)]
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    level_of = np.repeat(np.arange(levels, dtype=np.int64), counts)
    starts = [np.arange(count, dtype=np.int64) << level for level, count in enumerate(counts)]
    return offsets, level_of, np.concatenate(starts)
