"""The arenas of this process: which one a call uses, when one is made, and what happens after one has stopped.

An arena belongs to one stream, since the words in it count that stream's calls. Those of several processes are made and
replaced collectively, at the same call of every rank: sizes follow from the placement, which all ranks share.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from megaring.errors import UserError
from megaring.kernels.arena import ArenaLayout, Domain, LocalDomain
from megaring.kernels.symmetric import SymmetricDomain, barrier, gather_seats, seats_refusal

WORDS = ArenaLayout(tiles=0, kv_heads=1, head_dim=64)
GROWTH_TILES = 64  # sizes are multiples of this, so that similar steps share one arena


@dataclass(frozen=True)
class _Key:
    group: dist.ProcessGroup | None
    device: torch.device
    stream: int
    kv_heads: int
    head_dim: int


class Domains:
    """All arenas of a process; ``generation`` changes when they are dropped, so that nobody keeps using them."""

    def __init__(self) -> None:
        self.generation = 0
        self._made: dict[_Key, Domain] = {}
        self._refusals: dict[tuple[dist.ProcessGroup, torch.device], str | None] = {}

    def local(self, device: torch.device, stream: int, layout: ArenaLayout = WORDS) -> Domain:
        """The domain of this process alone: the words of its queue, and the slots of ``layout`` if it has any."""
        key = _Key(None, device, stream, layout.kv_heads, layout.head_dim)
        found = self._made.get(key)
        if found is None or found.layout.slots < layout.slots:
            refuse_capture()
            self._made[key] = LocalDomain(1, replace(layout, slots=_rounded(layout.slots)), device)
        return self._made[key]

    def shared(self, group: dist.ProcessGroup, device: torch.device, stream: int, layout: ArenaLayout) -> Domain:
        """The domain of all ranks of ``group`` with an arena of at least ``layout``; collective when it has to grow.

        Whoever holds an earlier, smaller one may go on using it as long as all ranks do.
        """
        key = _Key(group, device, stream, layout.kv_heads, layout.head_dim)
        found = self._made.get(key)
        if found is None or found.layout.tiles < layout.tiles or found.layout.slots < layout.slots:
            refuse_capture()
            least = layout if found is None else found.layout
            self._made[key] = SymmetricDomain(
                group,
                replace(
                    layout,
                    tiles=_rounded(max(layout.tiles, least.tiles)),
                    slots=_rounded(max(layout.slots, least.slots)),
                ),
                device,
            )
        return self._made[key]

    def refusal(self, group: dist.ProcessGroup, device: torch.device) -> str | None:
        """Why the ranks of ``group`` cannot share an arena, or None. Collective at its first use."""
        key = (group, device)
        if key not in self._refusals:
            refuse_capture()
            self._refusals[key] = seats_refusal(gather_seats(group, device))
        return self._refusals[key]

    def check(self) -> None:
        """Raise PeerTimeout if a call on any arena had to stop. Reads host memory, synchronises nothing."""
        for domain in self._made.values():
            domain.check()

    def drop(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """Forget the arenas of ``group``, once all its ranks have come here and their GPUs are idle. Collective."""
        barrier(group, device)
        self._made = {key: domain for key, domain in self._made.items() if key.group != group}
        self.generation += 1


def refuse_capture() -> None:
    """Raise UserError while the current stream is captured: what comes next cannot be part of a graph."""
    if torch.cuda.is_current_stream_capturing():
        raise UserError(
            "a CUDA graph cannot capture the first fused attention of a placement on a stream: make the same call once "
            "before the capture, on the stream that torch.cuda.graph(graph, stream=...) will use"
        )


def _rounded(tiles: int) -> int:
    return -(-tiles // GROWTH_TILES) * GROWTH_TILES
