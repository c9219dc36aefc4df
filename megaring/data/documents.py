"""Documents to training sequences: what becomes of those longer than the longest sequence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from buddyring import CapacityError, plan
from megaring.data.indexed import CorpusError, IndexedCorpus

POLICIES = ("error", "truncate", "split")


@dataclass(frozen=True, eq=False)
class Sequences:
    """The sequences of a corpus: whole documents, or pieces of long ones. Build it with ``make_sequences``.

    index: ``[n]`` int64, which document of the corpus. first: ``[n]`` int64, position of the piece in the document.
    lengths: ``[n]`` int64, tokens. Pieces of a document follow each other; each is trained as a sequence of its own.
    """

    corpus: IndexedCorpus
    index: np.ndarray
    first: np.ndarray
    lengths: np.ndarray

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, sequence: int) -> np.ndarray:
        """Its ids ``[L]``, a view of the memory map that is read when used."""
        first, length = int(self.first[sequence]), int(self.lengths[sequence])
        return self.corpus.tokens(int(self.index[sequence]), first, first + length)

    def describe(self, sequence: int) -> str:
        """Where a sequence comes from, for messages."""
        document, first = int(self.corpus.documents[self.index[sequence]]), int(self.first[sequence])
        piece = f", piece from token {first}" if first else ""
        return f"document {document} of {self.corpus.idx_path}{piece}"


def make_sequences(corpus: IndexedCorpus, seq_length: int, overlong: str) -> Sequences:
    """Sequences of at most ``seq_length`` tokens.

    overlong: what becomes of a longer document. ``"error"`` raises CorpusError, which names the first one, its length
    and the remedy; ``"truncate"`` keeps its first ``seq_length`` tokens; ``"split"`` cuts it into pieces of
    ``seq_length`` and a rest.
    """
    if overlong not in POLICIES:
        raise ValueError(f"overlong is {overlong!r}; choose from {', '.join(POLICIES)}")
    if seq_length < 1:
        raise ValueError(f"seq_length is {seq_length}; it must be at least 1")
    lengths = corpus.lengths
    documents = np.arange(len(lengths), dtype=np.int64)
    long = np.flatnonzero(lengths > seq_length)
    if overlong == "error" and long.size:
        raise CorpusError(
            f"document {corpus.documents[long[0]]} of {corpus.idx_path} has {lengths[long[0]]:,} tokens, more than "
            f"--seq-length {seq_length} ({long.size:,} such documents, the longest has {lengths.max():,}): "
            "raise --seq-length, or choose --overlong split or truncate"
        )
    if overlong != "split" or not long.size:
        return Sequences(corpus, documents, np.zeros_like(documents), np.minimum(lengths, seq_length))
    pieces = -(-lengths // seq_length)
    index = np.repeat(documents, pieces)
    piece = np.arange(len(index), dtype=np.int64) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    first = piece * seq_length
    return Sequences(corpus, index, first, np.minimum(lengths[index] - first, seq_length))


def check_plannable(sequences: Sequences, ranks: int, plan_options: Mapping[str, Any]) -> None:
    """Raise CorpusError when a domain of ``ranks`` cannot hold the longest sequence under ``plan_options``.

    plan_options: keyword arguments of ``buddyring.plan``; ValueError and TypeError of wrong ones pass through.
    """
    longest = int(sequences.lengths.argmax())
    try:
        plan([int(sequences.lengths[longest])], ranks, **plan_options)
    except CapacityError as error:
        raise CorpusError(
            f"{sequences.describe(longest)} has {sequences.lengths[longest]:,} tokens, more than a domain of {ranks} "
            f"ranks can hold: raise --capacity or --context-parallel-size, or lower --seq-length with --overlong split "
            f"or truncate ({error})"
        ) from error
