"""Which tokens the requests have cached, in which pages, for which owners: equal on all ranks. No torch.

A page is numbered by a slot, which is used again once the page is gone everywhere, and has an identity that is not.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from megaring.rollout.blocks import History, PageTable
from megaring.rollout.layout import HEADS, PAGE, POSITIONS, Layout, pages_of


@dataclass
class _Request:
    owner: int
    length: int = 0
    slots: list[int] = field(default_factory=list)


class Ledger:
    """Requests and their pages. Changes are collected in ``touched`` and ``copies`` until ``settle``.

    ``touched``: slots whose holders may have changed. ``copies``: (from, to) slots of pages that must be copied before
    their request appends to them.
    """

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.requests: dict[int, _Request] = {}
        self.touched: set[int] = set()
        self.copies: list[tuple[int, int]] = []
        self._references = np.zeros((0, ranks), np.int32)  # by slot and owner
        self._index = np.zeros(0, np.int64)  # a page's place in its request
        self._identity = np.zeros(0, np.int64)
        self._free: list[int] = []
        self._next_identity = 0

    def __contains__(self, request: int) -> bool:
        return request in self.requests

    def length(self, request: int) -> int:
        """Cached tokens of a request."""
        return self.requests[request].length

    def owner(self, request: int) -> int:
        """The rank that keeps the history of a request where owners do."""
        return self.requests[request].owner

    def slots(self, request: int) -> NDArray[np.int64]:
        """Slots of a request's pages, in order of positions."""
        return np.array(self.requests[request].slots, np.int64)

    @property
    def slots_made(self) -> int:
        """One more than the largest slot so far."""
        return len(self._index)

    def held(self, slots: NDArray[np.int64], layout: Layout, rank: int) -> NDArray[np.bool_]:
        """Which of ``slots`` are pages that ``rank`` holds (some heads of) under ``layout``."""
        references = self._references[slots]
        if layout.history == HEADS:
            return references.any(axis=1)
        if layout.history == POSITIONS:
            return references.any(axis=1) & (self._index[slots] % self.ranks == rank)
        return references[:, rank] > 0

    def pages_held(self, layout: Layout, without: Iterable[int] = ()) -> NDArray[np.int64]:
        """Pages of one layer that each rank holds under ``layout``, ``[ranks]``, were some requests not there."""
        references = self._references.copy()
        for request in without:
            known = self.requests[request]
            references[known.slots, known.owner] -= 1
        live = references.any(axis=1)
        if layout.history == HEADS:
            return np.full(self.ranks, live.sum(), np.int64)
        if layout.history == POSITIONS:
            return np.bincount(self._index[live] % self.ranks, minlength=self.ranks)
        return (references > 0).sum(axis=0)

    def new_pages(self, request: int, owner: int, tokens: int, layout: Layout) -> NDArray[np.int64]:
        """Pages of one layer that each rank needs at most for ``tokens`` more tokens of a request, known or new, of
        ``owner``. Of several that share a partly filled page, all but one copy it; all are counted.
        """
        known = self.requests.get(request)
        length = known.length if known else 0
        made = np.arange(pages_of(length), pages_of(length + tokens))
        if known and tokens and self._must_copy(known):
            made = np.append(made, length // PAGE)
        return pages_by_rank(made, owner, layout, self.ranks)

    def append(self, request: int, owner: int, tokens: int) -> None:
        """Make room for ``tokens`` more tokens; a new request begins here."""
        known = self.requests.setdefault(request, _Request(owner))
        if tokens and self._must_copy(known):
            self._copy_last(known)
        for index in range(pages_of(known.length), pages_of(known.length + tokens)):
            known.slots.append(self._new_page(index, known.owner))
        known.length += tokens

    def fork(self, request: int, source: int, tokens: int) -> None:
        """Begin ``request`` with the first ``tokens`` tokens of ``source``."""
        origin = self.requests[source]
        made = _Request(origin.owner, tokens, origin.slots[: pages_of(tokens)])
        self._refer(made, 1)
        self.requests[request] = made
        if tokens % PAGE and tokens != origin.length:  # the page has more tokens for its other users
            self._copy_last(made)

    def release(self, request: int) -> None:
        """Forget a request."""
        self._refer(self.requests.pop(request), -1)

    def move(self, request: int, owner: int) -> None:
        """Give a request to another owner."""
        known = self.requests[request]
        self._refer(known, -1)
        known.owner = owner
        self._refer(known, 1)

    def settle(self) -> None:
        """All ranks have followed the changes: pages that nobody uses give their slots back."""
        self._free += [slot for slot in sorted(self.touched) if not self._references[slot].any()]
        self.touched, self.copies = set(), []

    def histories(self, owners: Iterable[tuple[int, int]] = (), without: Iterable[int] = ()) -> list[History]:
        """The requests as the manifest takes them; ``owners`` are changes of (request, owner)."""
        changed, gone = dict(owners), set(without)
        return [
            History(number, changed.get(number, each.owner), each.length, tuple(self._identity[each.slots].tolist()))
            for number, each in sorted(self.requests.items())
            if each.length and number not in gone
        ]

    def slots_of(self, table: PageTable) -> NDArray[np.int64]:
        """The slot of every page of a table that was made from ``histories``."""
        live = np.flatnonzero(self._references.any(axis=1))
        order = live[np.argsort(self._identity[live])]
        return order[np.searchsorted(self._identity[order], table.origin)]

    def _must_copy(self, known: _Request) -> bool:
        return bool(known.length % PAGE) and int(self._references[known.slots[-1]].sum()) > 1

    def _copy_last(self, known: _Request) -> None:
        old = known.slots.pop()
        known.slots.append(self._new_page(int(self._index[old]), known.owner))
        self._references[old, known.owner] -= 1
        self.touched.add(old)
        self.copies.append((old, known.slots[-1]))

    def _new_page(self, index: int, owner: int) -> int:
        if not self._free:
            self._grow()
        slot = self._free.pop()
        self._references[slot, owner], self._index[slot] = 1, index
        self._identity[slot], self._next_identity = self._next_identity, self._next_identity + 1
        self.touched.add(slot)
        return slot

    def _grow(self) -> None:
        old, new = len(self._index), max(64, 2 * len(self._index))
        self._references = np.concatenate([self._references, np.zeros((new - old, self.ranks), np.int32)])
        self._index = np.concatenate([self._index, np.zeros(new - old, np.int64)])
        self._identity = np.concatenate([self._identity, np.zeros(new - old, np.int64)])
        self._free += range(new - 1, old - 1, -1)

    def _refer(self, known: _Request, by: int) -> None:
        np.add.at(self._references[:, known.owner], known.slots, by)
        self.touched.update(known.slots)


def pages_by_rank(indices: NDArray[np.int64], owner: int, layout: Layout, ranks: int) -> NDArray[np.int64]:
    """How many of one request's pages, given by their places in it, each rank holds under ``layout``."""
    if layout.history == HEADS:
        return np.full(ranks, len(indices), np.int64)
    if layout.history == POSITIONS:
        return np.bincount(indices % ranks, minlength=ranks)
    return np.where(np.arange(ranks) == owner, len(indices), 0)
