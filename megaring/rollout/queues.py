"""Who waits, who runs, and which histories of ended sequences are kept for their prefixes. No torch."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from megaring.rollout.layout import pages_of
from megaring.rollout.ledger import Ledger
from megaring.rollout.prefix import PrefixIndex
from megaring.rollout.sequence import Sequence


class Queues:
    """``waiting`` and ``running`` are in order of age. ``retained``: histories of ended sequences, by number, those
    that were used longest ago first. ``release``: histories that the next plan gives back.
    """

    def __init__(self) -> None:
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.retained: dict[int, Sequence] = {}
        self.release: list[int] = []
        self.prefixes = PrefixIndex()
        self._next_history = 0

    def __iter__(self) -> Iterator[Sequence]:
        yield from self.running
        yield from self.waiting

    def new_history(self) -> int:
        """A number that no history has had."""
        self._next_history += 1
        return self._next_history - 1

    def wait(self, sequence: Sequence) -> None:
        """Queue a sequence by its age."""
        insort(self.waiting, sequence, key=lambda each: each.order)

    def start(self, sequence: Sequence, history: int) -> None:
        """A waiting sequence begins to run under ``history``."""
        self.waiting.remove(sequence)
        sequence.history = history
        insort(self.running, sequence, key=lambda each: each.order)

    def preempt(self, sequence: Sequence) -> None:
        """Give back a running sequence's history; it waits again, to compute it anew."""
        self.running.remove(sequence)
        self._drop(sequence)
        sequence.preemptions += 1
        self.wait(sequence)

    def end(self, sequence: Sequence, retain: bool) -> None:
        """Take a sequence out; with ``retain`` its history stays for others until the room is needed."""
        (self.running if sequence.history is not None else self.waiting).remove(sequence)
        if retain and sequence.history is not None:
            self.prefixes.add(sequence.history, sequence.tokens[: sequence.cached])
            self.retained[sequence.history] = sequence
        else:
            self._drop(sequence)

    def evict(self, history: int) -> None:
        """Give back a retained history."""
        self._drop(self.retained.pop(history))

    def evict_unneeded(self) -> None:
        """Give back retained histories whose prompt no waiting sample of the same request will begin with."""
        if self.retained:
            wanted = {each.request.number for each in self.waiting if each.index}
            for history, sequence in list(self.retained.items()):
                if sequence.request.number not in wanted:
                    self.evict(history)

    def drop_prefixes(self) -> None:
        """No history may serve another sequence any more; those without a sequence are given back."""
        for history in list(self.retained):
            self.evict(history)
        self.prefixes.clear()

    def touch(self, history: int) -> None:
        """A retained history has just been used."""
        if history in self.retained:
            self.retained[history] = self.retained.pop(history)

    def growth(self, ledger: Ledger, share: float) -> NDArray[np.int64]:
        """Pages that the running sequences of each owner will have beyond those cached, ``[ranks]``."""
        made = np.zeros(ledger.ranks, np.int64)
        for sequence in self.running:
            made[ledger.owner(sequence.history)] += max(0, sequence.projected(share) - pages_of(sequence.cached))
        return made

    def _drop(self, sequence: Sequence) -> None:
        if sequence.history is not None:
            self.prefixes.remove(sequence.history)
            self.release.append(sequence.history)
            sequence.forget()
