"""Who exchanges what in each step of the ring, and which rows then attend to which: one plan for all groups.

Groups are aligned powers of two, so the partner of rank ``r`` in step ``s`` is ``r ^ s``, in every group larger than
``s`` that holds ``r``. A rank packs its sequences by descending group size, so the sequences of those groups are a
prefix of its rows, and the same sequences in the same order are a prefix of the partner's. Hence one exchange per step
serves all groups, on one communicator, and both sides know its size from the placement.

Zigzag makes masks unnecessary between ranks. A sequence's place ``p`` holds chunks ``p`` and ``2g - 1 - p``. From a
partner with a lower place, all my queries see the first of its two chunks (the front) and nothing of the second (the
back); from one with a higher place, my back queries see both its chunks. The partner's place is lower in every group
at once, namely when its rank is. So only fronts travel towards higher ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from buddyring import Shards
from megaring.backends.local.segments import Segments
from megaring.device_shards import DeviceShards, array_to_device


@dataclass(frozen=True)
class Part:
    """The first ``rows`` rows of the split sequences, or of only their fronts (keys) or backs (queries)."""

    half: bool
    rows: int


@dataclass(frozen=True, eq=False)
class Step:
    """One exchange with ``peer`` (a rank of the domain) and the block of attention that it feeds.

    sent: which of this rank's keys the peer needs. received_rows: how many keys come from it. queries: which of this
    rank's queries see those. segments: how they pair, one segment per sequence, without a mask.
    """

    peer: int
    sent: Part
    received_rows: int
    queries: Part
    segments: Segments


@dataclass(frozen=True, eq=False)
class RingPlan:
    """The ring of one rank. Build it with ``build_ring_plan``.

    tokens: rows that belong to sequences. split_rows: rows of sequences that other ranks share; they come first.
    fronts, backs: int64 indices of the rows of first and second chunks among the split rows.
    local: this rank's queries against its own keys, one segment per held sequence.
    """

    tokens: int
    split_rows: int
    fronts: torch.Tensor
    backs: torch.Tensor
    local: Segments
    steps: tuple[Step, ...]


def build_ring_plan(on_device: DeviceShards, causal: bool) -> RingPlan:
    """The plan of ``on_device.shards``; without ``causal`` everything sees everything and nothing is halved."""
    shards, device = on_device.shards, on_device.device
    held = np.diff(shards.cu_seqlens)
    split = _prefix(shards, 1)
    is_front = np.repeat(np.tile([True, False], split), _spans(shards)[:split].reshape(-1))
    steps = []
    for step in range(1, int(shards.groups[:, 1].max(initial=1))):
        peer = shards.peer(shards.rank ^ step)
        count = _prefix(shards, step)
        if not np.array_equal(shards.sequences[:count], peer.sequences[: _prefix(peer, step)]):
            raise AssertionError(f"ranks {shards.rank} and {peer.rank} do not pack the same sequences in step {step}")
        steps.append(_build_step(shards, peer, count, causal, device))
    return RingPlan(
        tokens=shards.num_tokens,
        split_rows=int(shards.cu_seqlens[split]),
        fronts=array_to_device(np.flatnonzero(is_front), device),
        backs=array_to_device(np.flatnonzero(~is_front), device),
        local=Segments.build(held, held, device),
        steps=tuple(steps),
    )


def _build_step(shards: Shards, peer: Shards, count: int, causal: bool, device: torch.device) -> Step:
    """The exchange of the first ``count`` sequences, which both ranks hold, with ``peer``."""
    mine, theirs = _spans(shards)[:count], _spans(peer)[:count]
    halves_mine = causal and peer.rank > shards.rank
    halves_theirs = causal and peer.rank < shards.rank
    keys = theirs[:, 0] if halves_theirs else theirs.sum(axis=1)
    sent = mine[:, 0] if halves_mine else mine.sum(axis=1)
    queries = mine[:, 1] if halves_mine else mine.sum(axis=1)
    return Step(
        peer=peer.rank,
        sent=Part(halves_mine, int(sent.sum())),
        received_rows=int(keys.sum()),
        queries=Part(halves_mine, int(queries.sum())),
        segments=Segments.build(queries, keys, device),
    )


def _prefix(shards: Shards, size: int) -> int:
    """How many held sequences have a group larger than ``size``; they come first."""
    return int((shards.groups[:, 1] > size).sum())


def _spans(shards: Shards) -> np.ndarray:
    """Rows of the front and the back chunk of each held sequence: ``[n, 2]`` int64."""
    return shards.chunks[:, :, 1] - shards.chunks[:, :, 0]
