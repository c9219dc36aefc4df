"""The rows of a step as each layout needs them, made once and shared by all layers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from megaring.rollout.attention.segments import Segment, Segments
from megaring.rollout.layout import PAGE, pages_of
from megaring.rollout.ledger import Ledger
from megaring.rollout.step import ALL, LAST, StepPlan
from megaring.rollout.targets import Targets
from megaring.rollout.uploads import upload


class Batch:
    """N new tokens in chunk order. Build it when the ledger has the plan's chunks.

    ``tokens``, ``positions``: int64 ``[N]`` on the device. ``by_owner``: rows sorted by owner, ``[N]``, and ``counts``
    how many each rank owns; ``own`` are this rank's. ``asked``: rows whose logits are wanted.
    """

    def __init__(self, plan: StepPlan, ledger: Ledger, rank: int, device: torch.device) -> None:
        self.rank, self.ranks, self._device = rank, ledger.ranks, device
        ends = np.cumsum([len(chunk.tokens) for chunk in plan.chunks], dtype=np.int64)
        starts = ends - [len(chunk.tokens) for chunk in plan.chunks]
        positions = [np.arange(chunk.start, chunk.start + len(chunk.tokens)) for chunk in plan.chunks]
        self._positions = np.concatenate([np.zeros(0, np.int64), *positions])
        self._chunks = [
            _Rows(int(start), int(end), chunk.start, ledger.owner(chunk.request), ledger.slots(chunk.request))
            for chunk, start, end in zip(plan.chunks, starts, ends, strict=True)
        ]
        pages = [each.slots[position // PAGE] for each, position in zip(self._chunks, positions, strict=True)]
        self._slots = np.concatenate([np.zeros(0, np.int64), *pages])
        owners = np.repeat([each.owner for each in self._chunks], ends - starts).astype(np.int64)
        self.counts = np.bincount(owners, minlength=self.ranks).tolist()
        self._by_owner = np.argsort(owners, kind="stable")
        asked = [
            _asked(chunk.logits, each.start, each.end) for chunk, each in zip(plan.chunks, self._chunks, strict=True)
        ]
        self.asked = self._tensor(np.concatenate([np.zeros(0, np.int64), *asked]))
        self.tokens = self._tensor(np.array([token for chunk in plan.chunks for token in chunk.tokens], np.int64))
        self.positions = self._tensor(self._positions)

    def __len__(self) -> int:
        return len(self._positions)

    @property
    def largest_position(self) -> int:
        """Of any row; there is one."""
        return int(self._positions.max())

    @cached_property
    def by_owner(self) -> torch.Tensor:
        """Rows in order of their owners."""
        return self._tensor(self._by_owner)

    @cached_property
    def from_owners(self) -> torch.Tensor:
        """The place of every row in ``by_owner``."""
        return self._tensor(np.argsort(self._by_owner))

    @cached_property
    def own(self) -> torch.Tensor:
        """The rows that this rank owns."""
        return self._tensor(self._own)

    @cached_property
    def all_targets(self) -> Targets:
        """Every row, for a rank that keeps all positions."""
        return self._targets(np.arange(len(self)), np.arange(len(self)))

    @cached_property
    def own_targets(self) -> Targets:
        """The rows of ``own``, counted in it."""
        return self._targets(np.arange(len(self._own)), self._own)

    @cached_property
    def local_targets(self) -> Targets:
        """The rows whose page is on this rank when pages are split by position."""
        here = np.flatnonzero(self._positions // PAGE % self.ranks == self.rank)
        return self._targets(here, here)

    @cached_property
    def all_segments(self) -> Segments:
        """Every chunk over its whole history."""
        made = [self._segment(each, each.start, np.arange(len(each.slots))) for each in self._chunks]
        return Segments(made, self._device)

    @cached_property
    def own_segments(self) -> Segments:
        """This rank's chunks over their whole histories; their rows count in ``own``."""
        made, row = [], 0
        for each in self._chunks:
            if each.owner == self.rank:
                made.append(self._segment(each, row, np.arange(len(each.slots))))
                row += each.end - each.start
        return Segments(made, self._device)

    @cached_property
    def local_segments(self) -> Segments:
        """Every chunk over the pages that are here when pages are split by position."""
        made = [
            self._segment(each, each.start, np.arange(self.rank, len(each.slots), self.ranks)) for each in self._chunks
        ]
        return Segments(made, self._device, shard=self.rank, shards=self.ranks)

    @property
    def _own(self) -> NDArray[np.int64]:
        first = sum(self.counts[: self.rank])
        return self._by_owner[first : first + self.counts[self.rank]]

    def _targets(self, rows: NDArray[np.int64], of: NDArray[np.int64]) -> Targets:
        return Targets(self._tensor(rows), self._slots[of], self._positions[of] % PAGE)

    def _segment(self, rows: _Rows, first: int, indices: NDArray[np.int64]) -> Segment:
        count = rows.end - rows.start
        length = rows.position + count
        indices = indices[indices < pages_of(length)]
        return Segment(slice(first, first + count), rows.position, rows.slots[indices], indices, length)

    def _tensor(self, array: NDArray[np.int64]) -> torch.Tensor:
        return upload(array, self._device)


@dataclass(frozen=True, eq=False)
class _Rows:
    """Rows ``start`` to ``end`` of the step: one chunk, whose first token is at ``position``."""

    start: int
    end: int
    position: int
    owner: int
    slots: NDArray[np.int64]


def _asked(logits: str, start: int, end: int) -> NDArray[np.int64]:
    if logits == ALL:
        return np.arange(start, end)
    return np.arange(end - 1, end) if logits == LAST else np.zeros(0, np.int64)
