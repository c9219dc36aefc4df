"""The free KV pages of every rank while a step is put together. No torch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from megaring.rollout.layout import HEADS, POSITIONS, Layout
from megaring.rollout.ledger import pages_by_rank


class Pool:
    """``free``: pages by rank, of ``total`` that there are room for. Pages are given by their places in a request."""

    def __init__(self, layout: Layout, total: NDArray[np.int64], held: NDArray[np.int64]) -> None:
        self.layout, self.total, self.free = layout, total, total - held

    def affordable(self, places: Sequence[int], owner: int) -> int:
        """How many of the first of ``places`` fit."""
        if self.layout.history == POSITIONS:
            left, ranks = self.free.copy(), len(self.free)
            for count, place in enumerate(places):
                left[place % ranks] -= 1
                if left[place % ranks] < 0:
                    return count
            return len(places)
        free = self.free.min() if self.layout.history == HEADS else self.free[owner]
        return min(len(places), max(0, int(free)))

    def take(self, places: Sequence[int], owner: int) -> None:
        """Use pages at these places."""
        if len(places):
            self.free = self.free - pages_by_rank(np.asarray(places), owner, self.layout, len(self.free))

    def room(self, growth: NDArray[np.int64]) -> list[int]:
        """Pages that each owner has left once its requests have grown by ``growth`` pages, ``[ranks]``.

        Where all ranks share the histories, every owner has the same.
        """
        if self.layout.history == HEADS:
            return [int(self.free.min() - growth.sum())] * len(growth)
        if self.layout.history == POSITIONS:
            return [int(self.free.min() * len(growth) - growth.sum())] * len(growth)
        return (self.free - growth).tolist()


def longest_request(layout: Layout, total: NDArray[np.int64]) -> int:
    """Pages that a request may have, were it alone, given the ``total`` pages of every rank."""
    if layout.history == POSITIONS:  # page p is on rank p % T, so the first rank that is full ends it
        return int(min(pages * len(total) + rank for rank, pages in enumerate(total.tolist())))
    return int(total.min() if layout.history == HEADS else total.max())
