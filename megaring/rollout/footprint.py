"""How much attention state a rank holds in each layout, the longest context, and how many requests are admitted.

Two views: the balanced formulas of SPLASH, equation 1, and the exact count of whole pages of an actual batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from megaring.rollout.blocks import PageTable, held_heads
from megaring.rollout.layout import HEADS, OWNERS, PAGE, Layout, pages_of
from megaring.rollout.manifest import Manifest
from megaring.rollout.shape import ModelShape


@dataclass(frozen=True)
class Sizes:
    """What equation 1 needs to know of a model on T ranks. All sizes in bytes.

    ``projections`` is W, ``token`` is k, ``head_split`` is h = min(T, cache heads): over how many ranks TP divides a
    history. ``effective_shards`` is what sharded layouts hold beyond W / T (see ``effective_shard_bytes``).
    """

    projections: float
    token: float
    ranks: int
    head_split: int = 1
    effective_shards: float = 0

    @classmethod
    def of(cls, shape: ModelShape, ranks: int) -> Self:
        """The sizes of ``shape`` on ``ranks`` ranks. Raises ValueError where its heads do not divide over them."""
        split = shape.head_split(ranks)
        return cls(shape.projection_bytes, shape.token_bytes, ranks, split, effective_shard_bytes(shape, ranks))

    def weight_bytes(self, layout: Layout) -> float:
        """Projections on one rank: W / T (and effective shards) where they are sharded, else W."""
        return self.projections / self.ranks + self.effective_shards if layout.sharded_projections else self.projections

    def requests_on_rank(self, layout: Layout, requests: int) -> float:
        """KV on the busiest rank in whole histories (SPLASH, table 2): B/h under TP, B/T under CP, else ceil(B/T)."""
        if layout.history == OWNERS:
            return -(-requests // self.ranks)
        return requests / (self.head_split if layout.history == HEADS else self.ranks)

    def rank_bytes(self, layout: Layout, requests: int, context: float) -> float:
        """M(s) of equation 1: projections and KV of ``requests`` requests of ``context`` tokens on the busiest rank."""
        return self.weight_bytes(layout) + self.requests_on_rank(layout, requests) * self.token * context

    def pool_bytes(self, layout: Layout, memory: float) -> float:
        """Bytes that ``memory`` per rank leaves for KV; 0 where the projections alone do not fit."""
        return max(0.0, memory - self.weight_bytes(layout))

    def pool_tokens(self, layout: Layout, memory: float) -> int:
        """Tokens that one rank's pool holds in whole pages; under TP with its share of the heads, else with all."""
        token = self.token / self.head_split if layout.history == HEADS else self.token
        return int(self.pool_bytes(layout, memory) // (PAGE * token)) * PAGE

    def longest_context(self, layout: Layout, memory: float, requests: int) -> float:
        """The longest context in tokens of ``requests`` equal requests within ``memory`` bytes per rank (section 2)."""
        return self.pool_bytes(layout, memory) / (self.requests_on_rank(layout, requests) * self.token)


@dataclass(frozen=True)
class Admission:
    """Requests of equal length that fit: ``each`` per owner (or in the one shared pool) and ``total``."""

    each: int
    total: int


def admission(layout: Layout, ranks: int, pool_tokens: int, tokens: int) -> Admission:
    """How many requests that grow to ``tokens`` tokens fit where every rank's pool holds ``pool_tokens``.

    Owner layouts admit per owner: what is left over on two ranks does not make room for one more. CP deals the pages of
    every request from rank 0 on, which is therefore the fullest.
    """
    if tokens < 1:
        raise ValueError(f"a request of {tokens} tokens; it has at least 1")
    pool, pages = pool_tokens // PAGE, pages_of(tokens)
    if layout.history == OWNERS:
        return Admission(pool // pages, pool // pages * ranks)
    each = pool // (pages if layout.history == HEADS else -(-pages // ranks))
    return Admission(each, each)


def effective_shard_bytes(shape: ModelShape, ranks: int) -> int:
    """Per rank, all layers: the KV rows that a rank needs and its slice of ``linear_qkv`` lacks, where H_kv < T.

    Its slice is 1/T of the rows, which cuts a KV group there; the rank computes from a copy that has its query heads
    and one whole KV head. It is derived from the parameters, not received, but takes memory (SPLASH, appendix A).
    """
    shape.check_ranks(ranks)
    if shape.mla is not None or shape.kv_heads >= ranks:
        return 0
    rows = (shape.query_heads // ranks + 2) * shape.head_dim
    return shape.layers * shape.weight_bytes * rows * (shape.hidden + (1 if shape.qkv_bias else 0))


def kv_rank_bytes(shape: ModelShape, layout: Layout, table: PageTable) -> list[int]:
    """Bytes of the whole pages that each rank holds of an actual batch, all layers."""
    counts = table.held(layout)
    return [
        int(counts[rank])
        * PAGE
        * len(held_heads(shape, layout, rank, table.ranks))
        * shape.cache_head_bytes
        * shape.layers
        for rank in range(table.ranks)
    ]


def rank_bytes(shape: ModelShape, layout: Layout, table: PageTable) -> list[int]:
    """M_r of an actual batch: projections and whole pages on each rank, all layers."""
    weights = int(Sizes.of(shape, table.ranks).weight_bytes(layout))
    return [weights + kv for kv in kv_rank_bytes(shape, layout, table)]


@dataclass(frozen=True)
class Shortage:
    """The rank that lacks most for a switch, and the terms of equation 5 there, in bytes."""

    rank: int
    before: int
    after: int
    transit: int
    reserve: int
    memory: int

    @property
    def missing(self) -> int:
        """Bytes beyond what the rank has."""
        return max(self.before, self.after) + self.transit + self.reserve - self.memory

    def __str__(self) -> str:
        gib = 2**30
        return (
            f"rank {self.rank} would need {max(self.before, self.after) / gib:.2f} GiB of state + "
            f"{self.transit / gib:.3f} of one layer in transit + {self.reserve / gib:.2f} reserve, and has "
            f"{self.memory / gib:.2f}"
        )


def switch_shortage(manifest: Manifest, memory: int | Sequence[int], reserve: int = 0) -> Shortage | None:
    """Equation 5 on every rank: ``max(M(a), M(b)) + one layer + reserve <= memory``; None where all ranks have room.

    ``memory`` is what a rank has for attention state, in bytes: one figure, or one per rank.
    """
    limits = [memory] * manifest.ranks if isinstance(memory, int) else list(memory)
    if len(limits) != manifest.ranks:
        raise ValueError(f"{len(limits)} memory sizes for {manifest.ranks} ranks; give one, or one per rank")
    before = rank_bytes(manifest.shape, manifest.source, manifest.before)
    after = rank_bytes(manifest.shape, manifest.destination, manifest.after)
    made = [
        Shortage(rank, before[rank], after[rank], manifest.transit_bytes(rank), reserve, limits[rank])
        for rank in range(manifest.ranks)
    ]
    worst = max(made, key=lambda each: each.missing)
    return worst if worst.missing > 0 else None
