"""What one rank does in a forward call, as the arrays that the kernel reads: made once per step, on the host, in NumPy.

A task is one query tile (128 packed rows of one chunk) and one head. It walks its keys in a fixed order: its own chunk
from the diagonal down, then the rank's other chunk of the sequence, then the chunks of other ranks in the order in
which they are pushed. A chunk that causality shows to a query of another chunk is shown whole, so only the own chunk
is masked. Every chunk starts a tile, here and in the arena, so no chunk has to start or end on a multiple of anything.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from buddyring.shards import Shards
from buddyring.zigzag import chunk_bounds
from megaring.errors import UserError

TILE = 128
L2_BUDGET = (
    32 << 20
)  # bytes of keys and values that a section of heads may span; an H200 has 60 MB of L2, in two halves


@dataclass(frozen=True, eq=False)
class ForwardPlan:
    """One rank's forward call.

    tiles: ``[n, 8]`` int32, longest first: first packed row, rows, first and past-the-last segment, tokens of the
    first segment, key tiles over all segments, sequence (its input index), 0.
    segments: ``[m, 4]`` int32: row (of the rank's tensors, or of the arena), tokens, 1 if in the arena, owning rank.
    sends: ``[k, 4]`` int32, most urgent first: packed row, tokens, receiving rank, row of its arena.
    tokens: packed rows that belong to sequences. rows: of the tensors; those past ``tokens`` come out as zeros.
    arena_tiles: tiles of the arena that other ranks fill. digest: equal on ranks that planned the same.
    """

    rank: int
    ranks: int
    tiles: np.ndarray
    segments: np.ndarray
    sends: np.ndarray
    tokens: int
    rows: int
    arena_tiles: int
    causal: bool
    digest: int


def plan_forward(shards: Shards, *, causal: bool = True) -> ForwardPlan:
    """The call of ``shards.rank``. Raises UserError for a placement whose groups are not aligned powers of two."""
    if not shards.aligned:
        raise UserError("the fused backend takes aligned groups of a power of two ranks; use the ring backend")
    arenas: dict[int, _Arena] = {}

    def arena_of(rank: int) -> _Arena:
        if rank not in arenas:
            arenas[rank] = _arena(shards.peer(rank), causal)
        return arenas[rank]

    own = arena_of(shards.rank)
    tiles, segments = _tiles(shards, own, causal)
    return ForwardPlan(
        rank=shards.rank,
        ranks=shards.ranks,
        tiles=tiles,
        segments=segments,
        sends=_sends(shards, arena_of, causal),
        tokens=shards.num_tokens,
        rows=shards.rows,
        arena_tiles=own.tiles,
        causal=causal,
        digest=_digest(shards, causal),
    )


def heads_per_section(
    plan: ForwardPlan, *, query_heads: int, kv_heads: int, head_dim: int, l2_budget: int = L2_BUDGET
) -> int:
    """Query heads whose keys and values together fit the L2 budget: tasks run through such sections one by one."""
    tokens = plan.tokens + plan.arena_tiles * TILE
    bytes_per_kv_head = max(1, tokens * head_dim * 2 * 2)
    return min(kv_heads, max(1, l2_budget // bytes_per_kv_head)) * (query_heads // kv_heads)


def arena_tiles(shards: Shards, causal: bool) -> int:
    """Most tiles that the arena of any rank of the step holds: how large all of them have to be."""
    return max(_arena(shards.peer(rank), causal).tiles for rank in range(shards.ranks))


def arena_places(shards: Shards, causal: bool) -> dict[int, np.ndarray]:
    """Per split sequence that ``shards.rank`` holds, the first arena tile of each chunk, -1 where it needs none."""
    return _arena(shards, causal).first_tile


@dataclass(frozen=True, eq=False)
class _Arena:
    """Where a rank's arena holds what: ``first_tile[sequence]`` is ``[2 * size]`` int64 per chunk, -1 if not needed."""

    first_tile: dict[int, np.ndarray]
    tiles: int


def _arena(shards: Shards, causal: bool) -> _Arena:
    first_tile, used = {}, 0
    for i in np.flatnonzero(shards.groups[:, 1] > 1).tolist():
        size, member = int(shards.groups[i, 1]), int(shards.members[i])
        lengths = np.diff(chunk_bounds(shards.lengths[i : i + 1], size, shards.placement.tile)[0])
        places = np.full(2 * size, -1, dtype=np.int64)
        for chunk in remote_chunks(size, member, causal):
            places[chunk] = used
            used += -(-int(lengths[chunk]) // TILE)
        first_tile[int(shards.sequences[i])] = places
    return _Arena(first_tile, used)


def remote_chunks(size: int, member: int, causal: bool) -> list[int]:
    """Chunks of others that ``member`` needs, in the order of their use: all front ones, then back ones.

    Its front half sees the front chunks of lower members; its back half all front ones and the back ones of higher
    members, which come before its own. Neighbours first, so that members do not all start on the same one.
    """
    others = [(member - step) % size for step in range(1, size)]
    fronts = sorted(others, key=lambda other: other > member)  # lower members first: the front half waits for them
    return fronts + [2 * size - 1 - other for other in others if not causal or other > member]


def _tiles(shards: Shards, arena: _Arena, causal: bool) -> tuple[np.ndarray, np.ndarray]:
    segments: list[tuple[int, int, int, int]] = []
    parts: list[np.ndarray] = []
    cu_seqlens = shards.cu_seqlens.astype(np.int64)
    for i in range(len(shards.sequences)):
        size, member = int(shards.groups[i, 1]), int(shards.members[i])
        spans = (shards.chunks[i, :, 1] - shards.chunks[i, :, 0]).tolist()
        starts = [int(cu_seqlens[i]), int(cu_seqlens[i]) + spans[0]]
        lengths = [int(shards.lengths[i]), 0]
        if size > 1:
            bounds = chunk_bounds(shards.lengths[i : i + 1], size, shards.placement.tile)[0]
            lengths = np.diff(bounds).tolist()
        own_chunks = (member, 2 * size - 1 - member)
        for side in (0, 1):
            if spans[side] == 0:
                continue
            begin = len(segments)
            segments.append((starts[side], spans[side], 0, shards.rank))
            if spans[1 - side] and (side == 1 or not causal):
                segments.append((starts[1 - side], spans[1 - side], 0, shards.rank))
            for chunk in remote_chunks(size, member, causal) if size > 1 else ():
                if lengths[chunk] and (chunk < own_chunks[side] or not causal):
                    owner = int(shards.groups[i, 0]) + min(chunk, 2 * size - 1 - chunk)
                    row = int(arena.first_tile[int(shards.sequences[i])][chunk]) * TILE
                    segments.append((row, lengths[chunk], 1, owner))
            parts.append(_chunk_tiles(segments, begin, int(shards.sequences[i]), causal))
    tiles = np.concatenate(parts) if parts else np.empty((0, 8), dtype=np.int64)
    order = np.argsort(-tiles[:, 5], kind="stable")
    return tiles[order].astype(np.int32), np.asarray(segments, dtype=np.int32).reshape(-1, 4)


def _chunk_tiles(segments: list[tuple[int, int, int, int]], begin: int, sequence: int, causal: bool) -> np.ndarray:
    """Tiles of the chunk whose segments are those from ``begin`` on, the first being the chunk itself."""
    start, span = segments[begin][:2]
    first_row = np.arange(0, span, TILE, dtype=np.int64)
    rows = np.minimum(TILE, span - first_row)
    seen = first_row + rows if causal else np.full_like(first_row, span)
    elsewhere = sum(-(-tokens // TILE) for _, tokens, _, _ in segments[begin + 1 :])
    tiles = np.zeros((len(first_row), 8), dtype=np.int64)
    tiles[:, 0], tiles[:, 1] = start + first_row, rows
    tiles[:, 2], tiles[:, 3] = begin, len(segments)
    tiles[:, 4], tiles[:, 5] = seen, -(-seen // TILE) + elsewhere
    tiles[:, 6] = sequence
    return tiles


def _sends(shards: Shards, arena_of: Callable[[int], _Arena], causal: bool) -> np.ndarray:
    """Front chunks of all sequences before back ones; tile by tile, each to all who need it."""
    parts = []
    cu_seqlens = shards.cu_seqlens.astype(np.int64)
    for i in np.flatnonzero(shards.groups[:, 1] > 1).tolist():
        start, size = (int(value) for value in shards.groups[i])
        member, sequence = int(shards.members[i]), int(shards.sequences[i])
        spans = (shards.chunks[i, :, 1] - shards.chunks[i, :, 0]).tolist()
        for side, chunk in enumerate((member, 2 * size - 1 - member)):
            offsets = np.arange(0, spans[side], TILE, dtype=np.int64)
            for step in range(1, size):
                peer = (member + step) % size
                first_tile = int(arena_of(start + peer).first_tile[sequence][chunk])
                if first_tile < 0:
                    continue
                part = np.empty((len(offsets), 7), dtype=np.int64)
                part[:, 0] = int(cu_seqlens[i]) + side * spans[0] + offsets
                part[:, 1] = np.minimum(TILE, spans[side] - offsets)
                part[:, 2] = start + peer
                part[:, 3] = first_tile * TILE + offsets
                part[:, 4], part[:, 5], part[:, 6] = side, offsets, i * size + step
                parts.append(part)
    if not parts:
        return np.empty((0, 4), dtype=np.int32)
    sends = np.concatenate(parts)
    order = np.lexsort((sends[:, 6], sends[:, 5], sends[:, 4]))
    return sends[order, :4].astype(np.int32)


def _digest(shards: Shards, causal: bool) -> int:
    placement = shards.placement
    text = json.dumps([placement.lengths, placement.groups, placement.ranks, placement.tile, causal])
    return zlib.crc32(text.encode())
