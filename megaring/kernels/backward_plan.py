"""What one rank does in a backward call, besides what its forward plan holds: made once per step, on the host.

A task is one tile of keys (up to 128 of one chunk, own or remote) and a group of query heads that share a KV head. The
rank's query tiles (up to 64 rows of one chunk) are numbered so that those which see a tile of keys are a contiguous
range: a sequence's front chunk comes directly before its back chunk, and keys that the front sees the back sees too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from buddyring.placement import Placement
from buddyring.shards import Shards
from buddyring.zigzag import chunk_bounds
from megaring.kernels.forward_plan import TILE, ForwardPlan, arena_places, plan_forward, remote_chunks

QUERY_TILE = 64
LONGEST_SHARE = 0.6
ENDED_MARGIN = 1.2  # a task is taken to have ended after this many times its share of the workers' time
CHUNK_TILES = 16  # query tiles that are prepared and converted at once; as in csrc/backward_arguments.cuh


@dataclass(frozen=True, eq=False)
class BackwardPlan:
    """One rank's backward call.

    forward: the plan of the forward call, whose arena and sends it shares.
    key_tasks: ``[n, 8]`` int32, sequence by sequence: first row (of the rank's tensors, or of the arena), tokens,
    owning rank, 1 if in the arena, first and past-the-last query tile, 1 if the first two query tiles hold the same
    tokens, slot of the owner's sums or -1.
    query_tiles: ``[m, 2]`` int32: first packed row, rows. owned: ``[k, 4]`` int32: slot, first packed row, tokens, key
    tasks of all ranks that add to it. slots: of the rank's own sums. sum_all: as given. held: ``[n]``, each
    task's sequence, by its place among those that the rank holds.
    """

    forward: ForwardPlan
    key_tasks: np.ndarray
    query_tiles: np.ndarray
    owned: np.ndarray
    slots: int
    sum_all: bool
    held: np.ndarray


def plan_backward(shards: Shards, *, causal: bool = True, sum_all: bool = False) -> BackwardPlan:
    """The backward call of ``shards.rank``.

    sum_all: whether whole sequences, too, go through fp32 sums, which they have to when several tasks share a tile of
    keys (fewer query heads per task than share a KV head). Raises UserError as ``plan_forward`` does.
    """
    forward = plan_forward(shards, causal=causal)
    slots: dict[int, dict[int, np.ndarray]] = {}

    def slots_of(rank: int) -> dict[int, np.ndarray]:
        if rank not in slots:
            slots[rank] = _slots(shards.peer(rank))
        return slots[rank]

    tasks: list[np.ndarray] = []
    query_tiles: list[np.ndarray] = []
    owned: list[np.ndarray] = []
    places = arena_places(shards, causal)
    tasks_held: list[int] = []
    first_query = 0
    for held in range(len(shards.sequences)):
        part = _sequence(shards, held, causal)
        sequence, size = part.sequence, part.size
        counts = [-(-span // QUERY_TILE) for span in part.spans]
        for start, span in zip(part.starts, part.spans, strict=True):
            query_tiles.append(_tiles(start, span, QUERY_TILE))
        end = first_query + sum(counts)
        for side, (start, span) in enumerate(zip(part.starts, part.spans, strict=True)):
            tiles = _tiles(start, span, TILE)
            slot = slots_of(shards.rank)[sequence][part.own[side]] + np.arange(len(tiles))
            summed = size > 1 or sum_all
            first = first_query + (counts[0] if side else 0)
            begin = first + 2 * np.arange(len(tiles)) if causal else np.full(len(tiles), first_query)
            tasks.append(_tasks(tiles, shards.rank, 0, begin, end, int(causal), slot if summed else -1))
            if summed:
                owned.append(
                    np.column_stack([slot, tiles, np.full(len(tiles), part.contributions(part.own[side], causal))])
                )
        for chunk in remote_chunks(size, part.member, causal) if size > 1 else ():
            if part.lengths[chunk] == 0:
                continue
            owner = part.group_start + min(chunk, 2 * size - 1 - chunk)
            first = first_query if not causal or chunk < part.own[0] else first_query + counts[0]
            if first == end:
                continue  # nobody here sees it
            tiles = _tiles(int(places[sequence][chunk]) * TILE, part.lengths[chunk], TILE)
            slot = slots_of(owner)[sequence][chunk] + np.arange(len(tiles))
            tasks.append(_tasks(tiles, owner, 1, np.full(len(tiles), first), end, 0, slot))
        first_query = end
        tasks_held.append(sum(map(len, tasks)) - sum(tasks_held))
    key_tasks = np.concatenate(tasks) if tasks else np.empty((0, 8), dtype=np.int64)
    own_slots = np.concatenate(owned) if owned else np.empty((0, 4), dtype=np.int64)
    return BackwardPlan(
        forward=forward,
        key_tasks=key_tasks.astype(np.int32),
        query_tiles=(np.concatenate(query_tiles) if query_tiles else np.empty((0, 2))).astype(np.int32),
        owned=own_slots.astype(np.int32),
        slots=len(own_slots),
        sum_all=sum_all,
        held=np.repeat(np.arange(len(tasks_held)), tasks_held),
    )


def task_order(plan: BackwardPlan, groups: int, workers: int) -> np.ndarray:
    """The order of the tasks: ``[n * groups]`` int64, key task * groups + group of query heads.

    A sequence's tasks of one group of heads follow each other, since they read the same queries and add to the same dQ:
    that keeps both in L2. The longest sequences come first, and of one block the tasks with most query tiles. The last
    tasks, as many as can keep all workers busy for the longest one's time, are ordered by length alone, so that workers
    end together.
    """
    tiles = (plan.key_tasks[:, 5] - plan.key_tasks[:, 4]).astype(np.int64)
    if not len(tiles):
        return np.empty(0, dtype=np.int64)
    longest = np.zeros(int(plan.held.max()) + 1, dtype=np.int64)
    np.maximum.at(longest, plan.held, tiles)
    task, group = (each.ravel() for each in np.divmod(np.arange(len(tiles) * groups), groups))
    order = np.lexsort((-tiles[task], group, plan.held[task], -longest[plan.held[task]]))
    work = np.cumsum(tiles[task[order]][::-1])[::-1]  # from each task to the end
    last = int(np.searchsorted(-work, -int(tiles.max()) * workers))
    tail = order[last:]
    order[last:] = tail[np.argsort(-tiles[task[tail]], kind="stable")]
    return order


def queue_items(plan: BackwardPlan, groups: int, workers: int) -> np.ndarray:
    """The queue of ``workers`` CTAs: ``[m, 4]`` int32: kind, key task or query chunk, group of query heads, tasks.

    Kind 0 is a task, in ``task_order``. Chunks of ``CHUNK_TILES`` query tiles are prepared (1) about one task of each
    worker before the first task that reads them, and converted (2) when the ``tasks`` that add to them should have
    ended. Whoever waits for items waits for earlier ones only.
    """
    order = task_order(plan, groups, workers)
    chunks = -(-len(plan.query_tiles) // CHUNK_TILES)
    task, group = np.divmod(order, groups)
    begin, end = (plan.key_tasks[:, 4] // CHUNK_TILES, -(-plan.key_tasks[:, 5] // CHUNK_TILES))
    first = np.full((chunks, groups), len(order), dtype=np.int64)
    last = np.full((chunks, groups), -1, dtype=np.int64)
    tasks = np.zeros((chunks, groups), dtype=np.int64)
    position = np.empty(len(order), dtype=np.int64)
    position[order] = np.arange(len(order))
    by_task = position.reshape(-1, groups)
    units = (plan.key_tasks[:, 5] - plan.key_tasks[:, 4]).astype(np.int64)[task]
    work = np.cumsum(units)
    ended = np.empty_like(position)  # the queue's position when a task should have ended, all workers being busy
    ended[order] = np.searchsorted(work, work + units * workers * ENDED_MARGIN, side="right")
    ended_by_task = ended.reshape(-1, groups)
    for chunk in range(chunks):
        touching = (begin <= chunk) & (end > chunk)
        first[chunk], last[chunk] = by_task[touching].min(axis=0), ended_by_task[touching].max(axis=0)
        tasks[chunk] = np.count_nonzero(touching)
    which, heads = (each.ravel() for each in np.divmod(np.arange(chunks * groups), groups))
    items = np.concatenate(
        [
            np.column_stack([np.zeros_like(task), task, group, np.zeros_like(task)]),
            np.column_stack([np.ones_like(which), which, heads, np.zeros_like(which)]),
            np.column_stack([np.full_like(which, 2), which, heads, tasks.ravel()]),
        ]
    )
    when = np.concatenate([2 * np.arange(len(order)), 2 * (first.ravel() - workers) - 1, 2 * last.ravel() + 1])
    return items[np.argsort(when, kind="stable")].astype(np.int32)


def alone(plan: BackwardPlan) -> BackwardPlan:
    """The same call on a rank that is a domain of its own, which it can be where nothing is split."""
    key_tasks = plan.key_tasks.copy()
    key_tasks[:, 2] = 0
    return replace(plan, forward=replace(plan.forward, rank=0, ranks=1), key_tasks=key_tasks)


def most_slots(shards: Shards, sum_all: bool) -> int:
    """Slots of the rank that needs most, which all ranks' arenas have."""
    return max(_num_slots(shards.peer(rank), sum_all) for rank in range(shards.ranks))


def choose_heads_per_task(placement: Placement, query_heads: int, kv_heads: int, workers: int) -> int:
    """Query heads per task: as many as share a KV head, fewer where tasks would be too few to share out evenly.

    The longest task's query tiles are kept below ``LONGEST_SHARE`` of what a worker has to do on average, in tiles of
    keys times tiles of queries over all sequences of the step. Depends on nothing that differs between ranks.
    """
    sizes = [group.size for group in placement.groups]
    tiles = [(length / size / QUERY_TILE, length / TILE) for length, size in zip(placement.lengths, sizes, strict=True)]
    mean = query_heads * sum(queries * keys / 2 for queries, keys in tiles) / placement.ranks / workers
    longest = max((queries for queries, _ in tiles), default=0.0)
    ratio = query_heads // kv_heads
    fitting = (heads for heads in range(ratio, 1, -1) if ratio % heads == 0 and longest * heads <= LONGEST_SHARE * mean)
    return next(fitting, 1)


@dataclass(frozen=True)
class _Sequence:
    """One held sequence. own: its two chunks here; starts, spans: their packed rows; lengths: of all its chunks."""

    sequence: int
    size: int
    member: int
    group_start: int
    own: tuple[int, int]
    starts: tuple[int, int]
    spans: tuple[int, int]
    lengths: tuple[int, ...]

    def contributions(self, chunk: int, causal: bool) -> int:
        """Ranks whose queries see ``chunk``."""
        if self.size == 1:
            return 1
        last = 2 * self.size - 1
        return sum(
            any(self.lengths[own] and (own >= chunk or not causal) for own in (member, last - member))
            for member in range(self.size)
        )


def _sequence(shards: Shards, held: int, causal: bool) -> _Sequence:
    group_start, size = (int(value) for value in shards.groups[held])
    member = int(shards.members[held])
    spans = tuple((shards.chunks[held, :, 1] - shards.chunks[held, :, 0]).tolist())
    start = int(shards.cu_seqlens[held])
    lengths = spans
    if size > 1:
        bounds = chunk_bounds(shards.lengths[held : held + 1], size, shards.placement.tile)[0]
        lengths = tuple(np.diff(bounds).tolist())
    own = (member, 2 * size - 1 - member)
    return _Sequence(
        int(shards.sequences[held]), size, member, group_start, own, (start, start + spans[0]), spans, lengths
    )


def _slots(shards: Shards) -> dict[int, np.ndarray]:
    """Per held sequence, the first slot of each of its chunks here, by chunk number: tile after tile, as packed.

    Split sequences come first in ``Shards``, so their slots are the same whether or not whole ones have any.
    """
    found: dict[int, np.ndarray] = {}
    used = 0
    for held in range(len(shards.sequences)):
        size, member = int(shards.groups[held, 1]), int(shards.members[held])
        places = np.full(2 * size, -1, dtype=np.int64)
        spans = (shards.chunks[held, :, 1] - shards.chunks[held, :, 0]).tolist()
        for chunk, span in zip((member, 2 * size - 1 - member), spans, strict=True):
            places[chunk] = used
            used += -(-span // TILE)
        found[int(shards.sequences[held])] = places
    return found


def _num_slots(shards: Shards, sum_all: bool) -> int:
    spans = (shards.chunks[:, :, 1] - shards.chunks[:, :, 0])[(shards.groups[:, 1] > 1) | sum_all]
    return int((-(-spans // TILE)).sum())


def _tiles(start: int, span: int, size: int) -> np.ndarray:
    offsets = np.arange(0, span, size, dtype=np.int64)
    return np.column_stack([start + offsets, np.minimum(size, span - offsets)])


def _tasks(
    tiles: np.ndarray, owner: int, remote: int, begin: np.ndarray, end: int, diagonal: int, slot: np.ndarray | int
) -> np.ndarray:
    tasks = np.empty((len(tiles), 8), dtype=np.int64)
    tasks[:, :2] = tiles
    tasks[:, 2], tasks[:, 3] = owner, remote
    tasks[:, 4], tasks[:, 5] = begin, end
    tasks[:, 6], tasks[:, 7] = diagonal, slot
    return tasks
