"""The placement of Megatron-LM's hybrid context-parallel scheduler, as a baseline.

Sizes follow memory (tokens per rank), never load: a sequence of ``L`` tokens needs the smallest power of two ranks
that leaves each at most ``target`` of them, and costs each of those ranks ``L**2 / need``. Rounds of disjoint groups
are made until every sequence has one; here all rounds become one layout.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from buddyring.placement import is_aligned
from buddyring.problem import Layout, Problem

SPREAD = 0.05  # of the largest load: ranks closer than this count as balanced
OVERFILL = 1.1  # a bucket may cost this much of its goal


@dataclass(frozen=True)
class Sample:
    """One sequence: its input index, its tokens, the ranks it needs and what it costs each of them."""

    index: int
    length: int
    need: int
    cost: float


@dataclass
class Group:
    """Consecutive ranks of one round; groups lie side by side in the order they were made."""

    size: int
    samples: list[Sample] = field(default_factory=list)
    load: float = 0.0

    def give(self, sample: Sample) -> None:
        """Take ``sample`` on."""
        self.samples.append(sample)
        self.load += sample.cost

    def give_back(self) -> Sample:
        """Hand the last sample back."""
        sample = self.samples.pop()
        self.load -= sample.cost
        return sample


def megatron(problem: Problem) -> Layout:
    """Rounds of buckets, heads, trimming and filling, merged into one layout.

    ``target`` (tokens per rank, default half of the mean) sizes the groups; ``max_group`` does not bind it. A need
    above the ranks is clamped to them. Groups can come out misaligned; ``Layout.notes`` says so. A sequence with fewer
    than two tokens per rank of its group takes the first ranks of it, as many as it has tokens for.
    """
    ranks = problem.ranks
    total = int(problem.lengths.sum())
    target = problem.target if problem.target is not None else max(total / ranks / 2, 1.0)
    samples, clamped = [], 0
    for index in np.argsort(-problem.lengths, kind="stable").tolist():
        length, need = int(problem.lengths[index]), 1
        while need * target < length:
            need *= 2
        clamped += need > ranks
        need = min(need, ranks)
        samples.append(Sample(index, length, need, length * length / need))
    groups = np.empty((len(samples), 2), dtype=np.int64)
    short = 0
    while samples:
        made, samples = make_round(samples, ranks)
        start = 0
        for group in made:
            for sample in group.samples:
                size = group.size
                while size > 1 and sample.length < 2 * size:
                    size = 1 << (size - 1).bit_length() - 1  # the power of two below
                short += size < group.size
                groups[sample.index] = start, size
            start += group.size
    return Layout(groups, tuple(_notes(groups, ranks, target, clamped, short)))


def _notes(groups: np.ndarray, ranks: int, target: float, clamped: int, short: int) -> list[str]:
    notes = []
    if clamped:
        notes.append(f"{clamped} sequences need more than {ranks} ranks of {target:g} tokens; clamped to all ranks")
    if short:
        notes.append(f"{short} sequences have too few tokens for their group and take its first ranks")
    misaligned = [i for i, (start, size) in enumerate(groups.tolist()) if not is_aligned(start, size, ranks)]
    if misaligned:
        start, size = groups[misaligned[0]].tolist()
        notes.append(
            f"{len(misaligned)} groups are misaligned, the first that of sequence {misaligned[0]} "
            f"(start {start}, size {size}); attention backends refuse this placement"
        )
    return notes


def make_round(samples: list[Sample], ranks: int) -> tuple[list[Group], list[Sample]]:
    """The groups of one round, in rank order, and the samples it leaves for the next, in order."""
    buckets = fill_buckets(samples)
    made = place_heads(buckets, ranks)
    trimmed = trim(made, ranks)
    fill_ranks(made, ranks)
    return made, [sample for bucket in buckets for sample in bucket] + trimmed


def fill_buckets(samples: list[Sample]) -> list[deque[Sample]]:
    """Samples in order, cut into buckets of about equal cost, one per distinct need if there are enough samples."""
    kinds = len({sample.need for sample in samples})
    goal = sum(sample.cost for sample in samples) / kinds
    buckets: list[deque[Sample]] = [deque()]
    cost = 0.0
    for position, sample in enumerate(samples):
        closed, left = len(buckets) - 1, len(samples) - position
        if buckets[-1] and (cost + sample.cost > OVERFILL * goal or left <= kinds - 2 * closed):
            buckets.append(deque())
            cost = 0.0
        buckets[-1].append(sample)
        cost += sample.cost
    return buckets


def place_heads(buckets: list[deque[Sample]], ranks: int) -> list[Group]:
    """Groups for the heads of ``buckets`` (which lose them), as long as a head fits and the ranks are not balanced."""
    made: list[Group] = []
    smaller_placed = False
    while any(buckets):
        if smaller_placed and is_balanced(made, ranks):
            break
        unused = ranks - sum(group.size for group in made)
        for bucket in buckets:
            if not bucket:
                continue
            need = bucket[0].need
            group = min((g for g in made if g.size == need), key=lambda g: g.load, default=None)
            if unused >= need and (group is None or group.load > 0):
                group = Group(need)
                made.append(group)
            if group is not None:
                break
        else:
            break
        smaller_placed = smaller_placed or need < made[0].size
        group.give(bucket.popleft())
    return made


def rank_extremes(made: list[Group], ranks: int) -> tuple[float, float]:
    """Largest and smallest load of a rank; an unused rank has none."""
    loads = [group.load for group in made]
    return max(loads), 0.0 if sum(group.size for group in made) < ranks else min(loads)


def is_balanced(made: list[Group], ranks: int) -> bool:
    """Whether all rank loads lie within ``SPREAD`` of the largest."""
    most, least = rank_extremes(made, ranks)
    return most - least <= SPREAD * most


def trim(made: list[Group], ranks: int) -> list[Sample]:
    """Samples taken back from the fullest group, one by one, while that brings the loads closer together."""
    trimmed: list[Sample] = []
    while True:
        most, least = rank_extremes(made, ranks)
        fullest = max(made, key=lambda group: group.load)
        if least == 0 or is_balanced(made, ranks) or len(fullest.samples) < 2:
            return trimmed
        sample = fullest.give_back()
        now_most, now_least = rank_extremes(made, ranks)
        if now_most - now_least >= most - least:
            fullest.give(sample)
            return trimmed
        trimmed.append(sample)


def fill_ranks(made: list[Group], ranks: int) -> None:
    """Double the smallest group, the one made first, while ranks are unused; those after it shift."""
    while (unused := ranks - sum(group.size for group in made)) > 0:
        smallest = min(made, key=lambda group: group.size)
        smallest.size += min(smallest.size, unused)
