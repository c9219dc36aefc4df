"""What one rank holds of a step: the one object that the loader, RoPE and every attention backend share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from buddyring.zigzag import held_chunks

if TYPE_CHECKING:
    from buddyring.placement import Placement


@dataclass(frozen=True, eq=False)
class Shards:
    """The shards of one rank, in packed order. Build it with ``Placement.shards``.

    Held sequences come by descending group size, then group start, then index. So they come in the same relative order
    on every rank of a group, and those with a group larger than any given size are a prefix of the packed tokens.

    With ``t`` tokens and ``n`` held sequences:
    tokens: ``[t]`` int64, indices into the concatenation of all sequences of the step in input order.
    positions: ``[t]`` int32, position of each token inside its sequence.
    cu_seqlens: ``[n + 1]`` int32, packed bounds of the held sequences (a sequence's two chunks in order).
    sequences: ``[n]`` int64, input index of each held sequence.
    groups: ``[n, 2]`` int64, (start, size). members: ``[n]`` int64, this rank's place in the group.
    lengths: ``[n]`` int64, tokens of the whole sequence. chunks: ``[n, 2, 2]`` int64, the two position ranges held.
    rows: rows the model sees, ``t`` rounded up to the placement's ``rank_multiple`` and at least one multiple; rows
    past ``cu_seqlens[-1]`` are dummies that belong to no sequence.
    """

    rank: int
    ranks: int
    tokens: np.ndarray
    positions: np.ndarray
    cu_seqlens: np.ndarray
    sequences: np.ndarray
    groups: np.ndarray
    members: np.ndarray
    lengths: np.ndarray
    chunks: np.ndarray
    rows: int
    aligned: bool
    placement: Placement

    @property
    def num_tokens(self) -> int:
        """Tokens held, without dummy rows."""
        return len(self.tokens)

    def peer(self, rank: int) -> Shards:
        """The shards of another rank of the same step."""
        return self.placement.shards(rank)


def build_shards(placement: Placement, rank: int) -> Shards:
    """Pack what ``rank`` holds of ``placement``."""
    lengths = np.asarray(placement.lengths, dtype=np.int64)
    groups = np.asarray(placement.groups, dtype=np.int64).reshape(-1, 2)
    offsets = np.cumsum(lengths) - lengths
    held = np.flatnonzero((groups[:, 0] <= rank) & (rank < groups[:, 0] + groups[:, 1]))
    held = held[np.lexsort((held, groups[held, 0], -groups[held, 1]))]
    lengths, groups, offsets = lengths[held], groups[held], offsets[held]
    members = rank - groups[:, 0]
    chunks = np.empty((len(held), 2, 2), dtype=np.int64)
    for size in np.unique(groups[:, 1]).tolist():
        chosen = groups[:, 1] == size
        chunks[chosen] = held_chunks(lengths[chosen], size, members[chosen], placement.tile)
    spans = (chunks[:, :, 1] - chunks[:, :, 0]).reshape(-1)
    positions = _ranges(chunks[:, :, 0].reshape(-1), spans)
    cu_seqlens = np.concatenate([[0], np.cumsum(spans.reshape(-1, 2).sum(axis=1))])
    if cu_seqlens[-1] >= 2**31:
        raise ValueError(f"rank {rank} would hold {int(cu_seqlens[-1])} tokens; cu_seqlens is int32, plan more ranks")
    shards = Shards(
        rank=rank,
        ranks=placement.ranks,
        tokens=positions + np.repeat(offsets, np.diff(cu_seqlens)),
        positions=positions.astype(np.int32),
        cu_seqlens=cu_seqlens.astype(np.int32),
        sequences=held,
        groups=groups,
        members=members,
        lengths=lengths,
        chunks=chunks,
        rows=placement.rows(rank),
        aligned=placement.aligned,
        placement=placement,
    )
    for value in vars(shards).values():
        if isinstance(value, np.ndarray):
            value.setflags(write=False)
    return shards


def _ranges(starts: np.ndarray, spans: np.ndarray) -> np.ndarray:
    """Concatenated ``arange(start, start + span)`` of every pair."""
    ends = np.cumsum(spans)
    return np.arange(ends[-1] if len(ends) else 0, dtype=np.int64) + np.repeat(starts - (ends - spans), spans)
