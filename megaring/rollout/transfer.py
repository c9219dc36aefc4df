"""The transfers that supply a rank with what a switch leaves it without: who sends which blocks to whom.

Where several ranks hold a missing block there is one sender by rule, so that all ranks derive the same lists: under TP,
of the ranks that share a head the one in the receiver's own place among them, which spreads the sends evenly; for a
page that several owners have, the lowest of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megaring.rollout.blocks import PageTable, held_heads, held_slices
from megaring.rollout.layout import HEADS, Layout
from megaring.rollout.shape import ModelShape


@dataclass(frozen=True)
class WeightTransfer:
    """One of the T slices of every projection of a layer, from rank to rank."""

    source: int
    destination: int
    slice: int
    bytes: int


@dataclass(frozen=True, eq=False)
class KvTransfer:
    """Pages of one layer with some of their cache heads, from rank to rank.

    ``pages`` (int64, ascending) index the manifest's page table; ``tokens`` are the live ones in them and ``bytes``
    what those tokens take in ``heads``.
    """

    source: int
    destination: int
    heads: range
    pages: NDArray[np.int64]
    tokens: int
    bytes: int


def weight_transfers(source: Layout, destination: Layout, ranks: int, slice_bytes: int) -> tuple[WeightTransfer, ...]:
    """Slices of one layer's projections that ranks lack, each from the rank that holds it under ``source``."""
    made = []
    for rank in range(ranks):
        missing = sorted(set(held_slices(destination, rank, ranks)) - set(held_slices(source, rank, ranks)))
        made += [WeightTransfer(each, rank, each, slice_bytes) for each in missing]
    return tuple(made)


def kv_transfers(
    shape: ModelShape, source: Layout, destination: Layout, before: PageTable, after: PageTable
) -> tuple[KvTransfer, ...]:
    """KV blocks of one layer that ranks lack, in the order (destination, source, heads)."""
    had, needed = before.holders(source), after.holders(destination)
    made = []
    for rank in range(before.ranks):
        old, new = (held_heads(shape, layout, rank, before.ranks) for layout in (source, destination))
        lacking = np.flatnonzero(needed[:, rank] & ~had[:, rank])
        partial = np.flatnonzero(needed[:, rank] & had[:, rank])  # here, perhaps without some of the heads
        below, above = range(new.start, min(old.start, new.stop)), range(max(old.stop, new.start), new.stop)
        found = []
        for wanted, heads in ((lacking, new), (partial, below), (partial, above)):
            for sender, pages, part in _senders(shape, source, before, had, rank, wanted, heads):
                tokens = int(before.tokens[pages].sum())
                found.append(KvTransfer(sender, rank, part, pages, tokens, kv_bytes(shape, tokens, len(part))))
        made += sorted(found, key=lambda each: (each.source, each.heads.start))
    return tuple(made)


def kv_bytes(shape: ModelShape, tokens: int, heads: int) -> int:
    """Bytes of ``tokens`` tokens of one layer in ``heads`` cache heads."""
    return tokens * heads * shape.cache_head_bytes


def _senders(
    shape: ModelShape,
    source: Layout,
    before: PageTable,
    had: NDArray[np.bool_],
    rank: int,
    pages: NDArray[np.int64],
    heads: range,
) -> Iterator[tuple[int, NDArray[np.int64], range]]:
    """Who sends which of ``pages`` x ``heads`` to ``rank``; nothing where one of them is empty."""
    if not len(pages) or not len(heads):
        return
    if source.history == HEADS:
        split = shape.head_split(before.ranks)
        width, copies = shape.cache_heads // split, before.ranks // split
        for group in range(heads.start // width, -(-heads.stop // width)):
            part = range(max(heads.start, group * width), min(heads.stop, (group + 1) * width))
            yield group * copies + rank % copies, pages, part
        return
    senders = np.argmax(had[pages], axis=1)  # the lowest rank that has the page
    for sender in np.unique(senders):
        yield int(sender), pages[senders == sender], heads
