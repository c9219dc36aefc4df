"""A switch of layouts as a difference of block sets (SPLASH, section 2, equations 2 and 3).

Rank r receives what it holds under the destination and not under the source, and frees the reverse. Every layer has the
same blocks, so one plan describes all of them. All ranks compute the same manifest and compare its digest before
anything moves.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from megaring.rollout.blocks import PageTable, held_heads
from megaring.rollout.format import StateFormat, check_reuse
from megaring.rollout.layout import HEADS, OWNERS, PAGE, Layout
from megaring.rollout.shape import ModelShape
from megaring.rollout.transfer import KvTransfer, WeightTransfer, kv_bytes, kv_transfers, weight_transfers

KEEP, DISCARD, ALL_GATHER, ALL_TO_ALL = "keep", "discard", "all_gather", "all_to_all"


@dataclass(frozen=True, eq=False)
class KvPages:
    """What becomes of one rank's pages in one layer; page numbers index the manifest's page table.

    ``kept`` are held before and after, with the cache heads in ``heads``, which stay where they are: memory is handed
    out by page and group of heads. ``freed`` are no longer needed on this rank.
    """

    kept: NDArray[np.int64]
    heads: range
    freed: NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Manifest:
    """Everything that one switch moves, keeps and frees; per layer, as all layers are alike.

    ``before`` and ``after`` list the same pages, with the owners on either side. ``weights`` and ``kv`` name the
    primitive that supplies each state: ``keep``, ``discard``, ``all_gather`` or ``all_to_all``. Transfers come in the
    order (destination, source), in which every rank enqueues them. Bytes count live tokens; memory counts whole pages.
    """

    shape: ModelShape
    source: Layout
    destination: Layout
    before: PageTable
    after: PageTable
    state_format: StateFormat
    weights: str
    kv: str
    weight_transfers: tuple[WeightTransfer, ...]
    kv_transfers: tuple[KvTransfer, ...]
    pages: tuple[KvPages, ...]  # by rank

    @property
    def ranks(self) -> int:
        """T, the size of the group."""
        return self.before.ranks

    def heads(self, layout: Layout, rank: int) -> range:
        """The cache heads of a page that ``rank`` holds under ``layout``."""
        return held_heads(self.shape, layout, rank, self.ranks)

    def sends(self, rank: int) -> tuple[list[WeightTransfer], list[KvTransfer]]:
        """What ``rank`` sends in one layer: weights and KV, in enqueue order."""
        return (
            [each for each in self.weight_transfers if each.source == rank],
            [each for each in self.kv_transfers if each.source == rank],
        )

    def receives(self, rank: int) -> tuple[list[WeightTransfer], list[KvTransfer]]:
        """What ``rank`` receives in one layer: weights and KV, in enqueue order."""
        return (
            [each for each in self.weight_transfers if each.destination == rank],
            [each for each in self.kv_transfers if each.destination == rank],
        )

    def received_weight_bytes(self, rank: int) -> int:
        """V^W of equation 3: bytes of projections that ``rank`` receives in one layer."""
        return sum(each.bytes for each in self.weight_transfers if each.destination == rank)

    def received_kv_bytes(self, rank: int) -> int:
        """V^K of equation 2 for one layer: bytes of live KV that ``rank`` receives."""
        return sum(each.bytes for each in self.kv_transfers if each.destination == rank)

    def received_bytes(self, rank: int) -> int:
        """Bytes of weights and live KV that ``rank`` receives in one layer."""
        return self.received_weight_bytes(rank) + self.received_kv_bytes(rank)

    def freed_weight_bytes(self, rank: int) -> int:
        """Bytes of projections that ``rank`` gives up in one layer; the same on every rank."""
        if not 0 <= rank < self.ranks:
            raise ValueError(f"rank {rank} is not in a group of {self.ranks}")
        if self.weights != DISCARD:
            return 0
        return self.shape.layer_projection_bytes // self.ranks * (self.ranks - 1)

    def freed_kv_bytes(self, rank: int) -> int:
        """Bytes of live KV that ``rank`` holds before the switch in one layer and does not need afterwards."""
        pages, old = self.pages[rank], self.heads(self.source, rank)
        freed = kv_bytes(self.shape, int(self.before.tokens[pages.freed].sum()), len(old))
        kept = int(self.before.tokens[pages.kept].sum())
        return freed + kv_bytes(self.shape, kept, len(old) - len(pages.heads))

    def transit_bytes(self, rank: int) -> int:
        """Delta of equation 5: what ``rank`` fills of one layer's destination while it still has the source.

        Received projections and the received heads of whole pages; what is kept stays in place.
        """
        pages = sum(len(each.pages) * len(each.heads) for each in self.receives(rank)[1])
        return self.received_weight_bytes(rank) + kv_bytes(self.shape, pages * PAGE, 1)

    @property
    def layer_bytes(self) -> int:
        """Bytes that the group receives in one layer, each counted once."""
        return sum(each.bytes for each in (*self.weight_transfers, *self.kv_transfers))

    @property
    def total_bytes(self) -> int:
        """Bytes that the group receives over all layers."""
        return self.shape.layers * self.layer_bytes

    @cached_property
    def digest(self) -> str:
        """128 bits, in hex, over all that ranks must agree on; equal in every process, whatever its hash seed."""
        head = {
            "switch": [self.source.name, self.destination.name],
            "primitives": [self.weights, self.kv],
            "sizes": [self.ranks, self.shape.layers, self.shape.layer_projection_bytes, self.shape.cache_head_bytes],
            "format": asdict(self.state_format),
            "weights": [[each.source, each.destination, each.slice] for each in self.weight_transfers],
        }
        made = hashlib.blake2b(json.dumps(head, sort_keys=True).encode(), digest_size=16)
        for array in (self.before.origin, self.before.index, self.before.tokens):
            made.update(array.astype("<i8").tobytes())
        for owners in (self.before.owners, self.after.owners):
            made.update(np.packbits(owners).tobytes())
        for each in self.kv_transfers:
            ends = [each.source, each.destination, each.heads.start, each.heads.stop, len(each.pages)]
            made.update(np.array(ends, "<i8").tobytes())
            made.update(each.pages.astype("<i8").tobytes())
        return made.hexdigest()


def make_manifest(
    shape: ModelShape,
    source: Layout,
    destination: Layout,
    before: PageTable,
    after: PageTable | None = None,
    *,
    source_format: StateFormat | None = None,
    destination_format: StateFormat | None = None,
) -> Manifest:
    """Plan the switch of a batch from ``source`` to ``destination``.

    ``after`` has the same pages with other owners where requests are rebalanced on the way; source and destination may
    then be the same layout. Raises ValueError for formats or pages that differ and for a group size that the heads do
    not divide over.
    """
    source_format = source_format or StateFormat()
    check_reuse(source_format, destination_format or source_format)
    after = after or before
    if not before.same_pages(after):
        raise ValueError(
            "the page tables before and after a switch list different pages; it neither adds nor drops any"
        )
    shape.check_ranks(before.ranks)
    moved = not np.array_equal(before.owners, after.owners)
    weights, kv = primitives(shape, source, destination, before.ranks, moved=moved)
    slice_bytes = shape.layer_projection_bytes // before.ranks
    return Manifest(
        shape,
        source,
        destination,
        before,
        after,
        source_format,
        weights,
        kv,
        weight_transfers(source, destination, before.ranks, slice_bytes),
        kv_transfers(shape, source, destination, before, after),
        _pages(shape, source, destination, before, after),
    )


def primitives(
    shape: ModelShape, source: Layout, destination: Layout, ranks: int, *, moved: bool = False
) -> tuple[str, str]:
    """The primitives that supply weights and KV (SPLASH, figure 3), whatever the batch holds.

    ``moved`` says that owners change on the way. With more than one cache head to split by, TP holds slices of heads,
    and what is a discard or an all-gather for MLA is an all-to-all.
    """
    weights = kv = KEEP
    if source.sharded_projections != destination.sharded_projections and ranks > 1:
        weights = ALL_GATHER if source.sharded_projections else DISCARD
    same = source.history == destination.history and not (moved and source.history == OWNERS)
    if not same and ranks > 1:
        kv = ALL_TO_ALL
        if shape.head_split(ranks) == 1 and HEADS in (source.history, destination.history):
            kv = ALL_GATHER if destination.history == HEADS else DISCARD
    return weights, kv


def _pages(
    shape: ModelShape, source: Layout, destination: Layout, before: PageTable, after: PageTable
) -> tuple[KvPages, ...]:
    had, needed, made = before.holders(source), after.holders(destination), []
    for rank in range(before.ranks):
        old, new = (held_heads(shape, layout, rank, before.ranks) for layout in (source, destination))
        common = range(max(old.start, new.start), min(old.stop, new.stop))
        kept = np.flatnonzero(had[:, rank] & needed[:, rank])
        made.append(KvPages(kept, common, np.flatnonzero(had[:, rank] & ~needed[:, rank])))
    return tuple(made)
