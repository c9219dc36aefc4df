"""The training order: one seeded order of all sequences, from which microbatches are filled first-fit."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np

from megaring.data.documents import Sequences
from megaring.data.indexed import CorpusError

WINDOW = 64


class Sampler:
    """Draws microbatches of at most ``token_budget`` tokens from a global order that is the same on every rank.

    Each epoch is a permutation of all sequences that depends on the seed and the epoch's number alone; a finished epoch
    continues in the next. A microbatch takes what earlier ones left over, oldest first, then goes on through the
    order, and leaves over what does not fit, until it is full or ``window`` sequences are left over. The oldest one
    always fits an empty microbatch, so none waits for ever. ``epochs`` bounds the order; then ``draw`` gives ``[]``.

    Raises CorpusError for a sequence longer than the budget. Memory: 4 or 8 bytes per sequence for the order.
    """

    def __init__(
        self, sequences: Sequences, token_budget: int, seed: int, *, window: int = WINDOW, epochs: int | None = None
    ):
        if token_budget < 1 or window < 1:
            raise ValueError(f"token_budget ({token_budget}) and window ({window}) must be at least 1")
        longest = int(sequences.lengths.argmax())
        if sequences.lengths[longest] > token_budget:
            raise CorpusError(
                f"{sequences.describe(longest)} has {sequences.lengths[longest]:,} tokens, more than a microbatch "
                f"of the whole domain holds (--token-budget {token_budget}): raise --token-budget, or "
                "lower --seq-length with --overlong split or truncate"
            )
        self._lengths = sequences.lengths
        self._budget, self._seed, self._window, self._epochs = token_budget, seed, window, epochs
        self._left_over: list[int] = []
        # A saved position names its order: the lengths stand for corpus and overlong policy, the permutation for
        # NumPy's generator, whose stream may change between versions.
        self._lengths_crc = zlib.crc32(np.ascontiguousarray(self._lengths))
        self._enter(0)

    def _enter(self, epoch: int) -> None:
        self._epoch, self._next = epoch, 0
        kind = np.uint32 if len(self._lengths) < 2**32 else np.uint64
        order = np.arange(len(self._lengths), dtype=kind)
        np.random.Generator(np.random.PCG64([self._seed, epoch])).shuffle(order)
        self._order = order
        self._fingerprint = [len(order), self._lengths_crc, zlib.crc32(order)]

    def draw(self) -> list[int]:
        """Numbers of the next microbatch's sequences, in the order they were taken; empty after the last epoch."""
        taken, left_over, room = [], [], self._budget
        for sequence in self._left_over:
            length = int(self._lengths[sequence])
            if length <= room:
                taken.append(sequence)
                room -= length
            else:
                left_over.append(sequence)
        while room and len(left_over) < self._window:
            sequence = self._advance()
            if sequence is None:
                break
            length = int(self._lengths[sequence])
            if length <= room:
                taken.append(sequence)
                room -= length
            else:
                left_over.append(sequence)
        self._left_over = left_over
        return taken

    def _advance(self) -> int | None:
        if self._next == len(self._order):
            if self._epochs is not None and self._epoch + 1 >= self._epochs:
                return None
            self._enter(self._epoch + 1)
        self._next += 1
        return int(self._order[self._next - 1])

    def state(self) -> dict[str, Any]:
        """Where the order stands, as a small dict for JSON: ``restore`` goes on with exactly the next microbatch."""
        return {
            "epoch": self._epoch,
            "next": self._next,
            "left_over": list(self._left_over),
            "seed": self._seed,
            "order": list(self._fingerprint),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on where ``state`` was taken. The token budget and the window may differ from the run that took it.

        Raises CorpusError when the order is another one: other documents, seed, ``seq_length`` or overlong policy.
        """
        try:
            epoch, position, left_over = int(state["epoch"]), int(state["next"]), [int(s) for s in state["left_over"]]
            seed, order = int(state["seed"]), list(state["order"])
        except (KeyError, TypeError, ValueError) as error:
            raise CorpusError(f"not a saved position in a corpus: {error!r}") from error
        if seed != self._seed:
            raise CorpusError(
                f"the position was saved with --seed {seed}, this run has --seed {self._seed}; use {seed}"
            )
        if epoch != self._epoch:
            self._enter(epoch)
        if order != self._fingerprint:
            raise CorpusError(
                "the position was saved in another training order: resume with the same corpus, --seq-length and "
                "--overlong (and NumPy), or load the weights alone and begin the corpus anew (--finetune)"
            )
        self._next, self._left_over = position, left_over
