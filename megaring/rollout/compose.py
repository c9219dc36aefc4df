"""Put a step together: which sequences get how many rows, who gives way, and who begins. No torch.

The rules, in this order:

1. Every running sequence that decodes gets one row; what is left of the token budget goes to prompts, oldest first.
2. Pages go to the oldest first. Where they run out, kept prefixes go; then a prompt takes as many rows as fit; then the
   youngest sequence is preempted whose pages would help (of the same owner where owners hold histories) and which is
   younger than the one in need; then the one in need pauses. So the oldest always moves on, and a preempted sequence
   computes its history anew later: its tokens stay.
3. If nobody was preempted, waiting sequences begin, oldest first, each at the owner that has the most room left once
   all its sequences have grown as projected, or where its prefix is, if there is room. The first that finds none ends
   it: nobody overtakes.
"""

from __future__ import annotations

from collections.abc import Sequence as Listing
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megaring.rollout.layout import OWNERS, PAGE, Layout, pages_of
from megaring.rollout.ledger import Ledger
from megaring.rollout.owners import choose_owner
from megaring.rollout.pool import Pool
from megaring.rollout.queues import Queues
from megaring.rollout.sequence import Sequence
from megaring.rollout.step import ALL, LAST, NO_LOGITS, Chunk, Fork


@dataclass(frozen=True)
class Limits:
    """Of one step: ``rows``, ``running`` sequences, and ``logits``, rows whose logits a prompt may ask for at once.
    ``growth``: the share of what a sequence may still grow by that admission reckons with.
    """

    rows: int
    running: int
    logits: int
    growth: float


@dataclass(frozen=True, eq=False)
class Draft:
    """A step that fits, not yet carried out. ``work``: the sequences of ``chunks``, in the same order. ``starts``:
    waiting sequences with their new histories. ``preempted`` and ``evicted`` give back their histories in this step.
    """

    layout: Layout
    work: tuple[Sequence, ...] = ()
    chunks: tuple[Chunk, ...] = ()
    forks: tuple[Fork, ...] = ()
    starts: tuple[tuple[Sequence, int], ...] = ()
    preempted: tuple[Sequence, ...] = ()
    evicted: tuple[int, ...] = ()


class Composer:
    """Makes one draft. ``total``: pages that every rank has room for under ``layout``; ``version``: of the weights."""

    def __init__(
        self,
        queues: Queues,
        ledger: Ledger,
        limits: Limits,
        layout: Layout,
        total: NDArray[np.int64],
        version: int,
    ) -> None:
        self._queues, self._ledger, self._limits = queues, ledger, limits
        self._layout, self._total, self._version = layout, total, version
        self._evictable = list(queues.retained)
        self._evicted: list[int] = []
        self._preempted: list[Sequence] = []
        self._work: list[Sequence] = []
        self._chunks: list[Chunk] = []
        self._forks: list[Fork] = []
        self._starts: list[tuple[Sequence, int]] = []
        self._taken: list[tuple[Listing[int], int]] = []
        self._pool = self._fresh_pool(self._evicted)

    def draft(self) -> Draft:
        """The step."""
        wanted = self._share_rows()
        for sequence in self._queues.running:
            if sequence in self._preempted or sequence not in wanted:
                continue
            owner = self._ledger.owner(sequence.history)
            rows = self._secure(sequence, owner, wanted[sequence])
            if rows:
                self._add(sequence, sequence.history, owner, sequence.cached, rows)
        if not self._preempted:
            self._admit(self._limits.rows - sum(wanted.values()))
        return Draft(
            self._layout,
            tuple(self._work),
            tuple(self._chunks),
            tuple(self._forks),
            tuple(self._starts),
            tuple(self._preempted),
            tuple(self._evicted),
        )

    def _share_rows(self) -> dict[Sequence, int]:
        running = self._queues.running
        wanted = {sequence: 1 for sequence in running if sequence.pending == 1}
        left = self._limits.rows - len(wanted)
        for sequence in running:
            if sequence.pending > 1 and left > 0:
                wanted[sequence] = min(sequence.pending, left, self._most(sequence))
                left -= wanted[sequence]
        return wanted

    def _most(self, sequence: Sequence) -> int:
        return self._limits.logits if sequence.request.wants_prompt_logprobs else self._limits.rows

    def _secure(self, sequence: Sequence, owner: int, wanted: int) -> int:
        """Take pages for at most ``wanted`` rows of a running sequence; returns for how many there are any."""
        length, places = sequence.cached, _places(sequence.cached, wanted, sequence.shares_last)
        if not places:
            return wanted
        while True:
            count = self._pool.affordable(places, owner)
            if count == len(places):
                self._take(places, owner)
                return wanted
            if self._evict(keep=()):
                continue
            rows = min(wanted, _rows_within(length, places[:count], sequence.shares_last))
            if rows > 0:
                self._take(places[:count], owner)
                return rows
            if not self._preempt_younger(sequence, owner):
                return 0

    def _preempt_younger(self, sequence: Sequence, owner: int) -> bool:
        for victim in reversed(self._queues.running):
            if victim.order <= sequence.order:
                return False
            if victim in self._preempted:
                continue
            if self._layout.history != OWNERS or self._ledger.owner(victim.history) == owner:
                self._preempted.append(victim)
                self._pool = self._fresh_pool(self._evicted)
                return True
        return False

    def _admit(self, rows: int) -> None:
        running = len(self._queues.running)
        if not self._queues.waiting or running >= self._limits.running or rows < 1:
            return
        growth = self._queues.growth(self._ledger, self._limits.growth)
        without_kept = self._fresh_pool([*self._evicted, *self._evictable])  # they go one by one, when they have to
        for sequence in self._queues.waiting:
            if rows < 1 or running >= self._limits.running:
                return
            if not self._begin(sequence, without_kept, growth, rows, alone=not running):
                return
            rows -= len(self._chunks[-1].tokens)
            running += 1

    def _begin(
        self, sequence: Sequence, without_kept: Pool, growth: NDArray[np.int64], rows: int, *, alone: bool
    ) -> bool:
        """Begin a waiting sequence, if there is room for it, and enter it in ``without_kept`` and ``growth``."""
        room = without_kept.room(growth)
        least = pages_of(len(sequence.tokens))
        needed = least if alone else sequence.projected(self._limits.growth)
        for source, shared in [*self._prefix(sequence), (None, 0)]:
            if source is not None:
                owner = self._ledger.owner(source)
                saved = 0 if source in self._evictable else shared // PAGE
                if room[owner] < needed - saved:
                    continue
            else:
                loads = self._loads(growth)
                limits = [load + each for load, each in zip(loads, room, strict=True)]
                owner, saved = choose_owner(loads, limits, needed), 0
                if self._layout.history != OWNERS and owner is not None:  # equal room; spread them for later
                    owner = loads.index(min(loads))
                if owner is None:
                    return False
            wanted = min(len(sequence.tokens) - shared, rows, self._most(sequence))
            places = _places(shared, wanted, shared % PAGE > 0)
            while (count := self._pool.affordable(places, owner)) < len(places) and self._evict(keep=(source,)):
                pass
            got = min(wanted, _rows_within(shared, places[:count], shared % PAGE > 0))
            if got < 1:
                continue
            self._take(places[:count], owner)
            without_kept.take(places[:count], owner)
            history = self._queues.new_history()
            if source is not None:
                self._forks.append(Fork(history, source, shared))
                if source in self._evictable:
                    self._evictable.remove(source)
                    without_kept.take(range(pages_of(shared)), owner)
            self._starts.append((sequence, history))
            self._add(sequence, history, owner, shared, got)
            growth[owner] += max(0, needed - saved - len(places[:count]))
            return True
        return False

    def _prefix(self, sequence: Sequence) -> list[tuple[int, int]]:
        """A history to begin with and its tokens: another sample's, with the whole prompt, or one with equal pages.

        Not for a request that wants something of every prompt token, which nobody computes again.
        """
        request = sequence.request
        if request.wants_prompt_logprobs or (request.params.experts and sequence.experts_known < len(request.prompt)):
            return []
        prompt = len(request.prompt)
        if len(sequence.tokens) > prompt:
            for other in request.samples:
                usable = other.history is not None and other.version == self._version and other.cached >= prompt
                if other is not sequence and usable and other.history not in self._evicted:
                    return [(other.history, prompt)]
        found = self._queues.prefixes.find(sequence.tokens)
        return [found] if found and found[0] not in self._evicted else []

    def _add(self, sequence: Sequence, history: int, owner: int, start: int, rows: int) -> None:
        end = start + rows
        last = end == len(sequence.tokens)
        logits = ALL if sequence.request.wants_prompt_logprobs else LAST if last else NO_LOGITS
        self._work.append(sequence)
        self._chunks.append(Chunk(history, owner, start, tuple(sequence.tokens[start:end]), logits))

    def _take(self, places: Listing[int], owner: int) -> None:
        self._pool.take(places, owner)
        self._taken.append((places, owner))

    def _evict(self, keep: tuple[int | None, ...]) -> bool:
        victim = next((each for each in self._evictable if each not in keep), None)
        if victim is None:
            return False
        self._evictable.remove(victim)
        self._evicted.append(victim)
        self._pool = self._fresh_pool(self._evicted)
        return True

    def _fresh_pool(self, evicted: Listing[int]) -> Pool:
        gone = [*self._queues.release, *evicted, *(each.history for each in self._preempted)]
        pool = Pool(self._layout, self._total, self._ledger.pages_held(self._layout, gone))
        for places, owner in self._taken:
            pool.take(places, owner)
        return pool

    def _loads(self, growth: NDArray[np.int64]) -> list[int]:
        """Pages that each owner's running sequences will have, by ``growth``."""
        loads = growth.copy()
        for sequence in self._queues.running:
            loads[self._ledger.owner(sequence.history)] += pages_of(sequence.cached)
        for places, owner in self._taken:
            loads[owner] += len(places)
        return loads.tolist()


def _places(length: int, rows: int, copies_last: bool) -> list[int]:
    """Places of the pages that ``rows`` more tokens need, with that of a shared last page, which is copied."""
    copied = [length // PAGE] if copies_last and length % PAGE and rows else []
    return [*copied, *range(pages_of(length), pages_of(length + rows))]


def _rows_within(length: int, places: Listing[int], copies_last: bool) -> int:
    """Rows that can be appended with the pages at ``places``, which are the first of ``_places``."""
    if copies_last and length % PAGE:
        if not places:
            return 0
        places = places[1:]
    return (pages_of(length) + len(places)) * PAGE - length
