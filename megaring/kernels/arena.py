"""The memory through which the ranks of a domain exchange keys and values, and the words that go with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megaring.errors import UserError
from megaring.kernels.arguments import CONTROL_BYTES, DOMAIN_RANKS, LAUNCH_RANKS, RECORD_WORDS
from megaring.kernels.workspace import Workspace

TILE = 128
ALIGNMENT = 1024
WAITS = {1: "room in the arena", 2: "a tile", 3: "a tile of the same placement", 4: "gradients of its keys"}
STOPPED_HERE = 1


class PeerTimeout(RuntimeError):
    """A wait for another rank ran out; the message is the kernel's record. The arena has to be rebuilt."""


@dataclass(frozen=True)
class ArenaLayout:
    """Bytes of one rank's arena: control words, two sets of tile flags, two buffers of K and V tiles, gradients' sums.

    tiles: that other ranks fill, per buffer. slots: tiles of the rank's own keys whose dK and dV are summed in fp32.

    The layout is fixed for the arena's life, since flags are only ever raised: a word that once was data would lie.
    """

    tiles: int
    kv_heads: int
    head_dim: int
    slots: int = 0

    @property
    def rows(self) -> int:
        """Rows per buffer, of K and of V each."""
        return self.tiles * TILE

    @property
    def flags_offset(self) -> int:
        """Where the flags begin."""
        return CONTROL_BYTES

    @property
    def data_offset(self) -> int:
        """Where the tiles begin."""
        return -(-(CONTROL_BYTES + 2 * self.tiles * 2 * 8) // ALIGNMENT) * ALIGNMENT

    @property
    def counts_offset(self) -> int:
        """Where the counts of contributions to slots begin."""
        return self.data_offset + 2 * 2 * self.rows * self.kv_heads * self.head_dim * 2

    @property
    def sums_offset(self) -> int:
        """Where the slots' sums begin."""
        return -(-(self.counts_offset + self.slots * self.kv_heads * 8) // ALIGNMENT) * ALIGNMENT

    @property
    def bytes(self) -> int:
        """All of it."""
        return self.sums_offset + self.slots * self.kv_heads * 2 * TILE * self.head_dim * 4


class Domain:
    """Ranks that reach each other's arenas, as one process sees them.

    ``arenas[r]`` is the byte tensor of rank ``r``, mapped into this device's memory if it is another's. ``local`` are
    the ranks that live on this device and share its launches, in that order. ``record`` is ``[len(local), 8]`` int64
    words in pinned host memory, to which the kernel writes what it waited for when a wait runs out.
    """

    def __init__(self, arenas: Sequence[torch.Tensor], local: range, layout: ArenaLayout, device: torch.device):
        if not 1 <= len(local) <= LAUNCH_RANKS:
            raise UserError(f"one launch carries 1 to {LAUNCH_RANKS} ranks, not {len(local)}")
        if len(arenas) > DOMAIN_RANKS:
            raise UserError(f"one arena domain has at most {DOMAIN_RANKS} ranks, not {len(arenas)}")
        self.ranks = len(arenas)
        self.local = local
        self.layout = layout
        self.device = device
        self.arenas = list(arenas)
        self.record = torch.zeros(len(local), RECORD_WORDS, dtype=torch.int64, pin_memory=True)
        self._workspace: Workspace | None = None

    def workspace(self, query_tiles: int, query_heads: int, head_dim: int) -> Workspace:
        """Scratch memory for backward calls of a domain with one local rank; grows when a step needs more.

        Raises UserError when it would have to grow inside a CUDA-graph capture.
        """
        if self._workspace is None or not self._workspace.fits(query_tiles, query_heads, head_dim):
            self._workspace = Workspace.make(query_tiles, query_heads, head_dim, self.device)
        return self._workspace

    def data(self, rank: int, dtype: torch.dtype) -> torch.Tensor:
        """The tiles of one arena as ``[2 buffers x (K, V) x rows, kv_heads, head_dim]``."""
        data = self.arenas[rank][self.layout.data_offset : self.layout.counts_offset].view(dtype)
        return data.view(-1, self.layout.kv_heads, self.layout.head_dim)

    def check(self) -> None:
        """Raise PeerTimeout if an earlier call on this domain had to stop. Reads host memory, synchronises nothing."""
        stopped = [words for words in self.record.tolist() if words[0] != 0]
        if not stopped:
            return
        lines = []
        for status, what, rank, peer, sequence, tile, expected, seen in stopped:
            if status != STOPPED_HERE:
                lines.append("another rank stopped the call")
                continue
            where = f", sequence {sequence}, arena tile {tile}" if sequence >= 0 else ""
            lines.append(
                f"rank {rank} waited for {WAITS[what]} from rank {peer}{where}: "
                f"expected {expected:#x}, saw {seen:#x} (epoch in the upper half)"
            )
        raise PeerTimeout(
            f"the fused attention stopped and its outputs are NaN: {'; '.join(sorted(set(lines)))}; "
            "megaring.backends.fused.rebuild, called by all ranks, gives later calls a new arena"
        )


class LocalDomain(Domain):
    """Ranks that all live on this device: one, or several virtual ones that share a launch. Arenas start as zeros."""

    def __init__(self, ranks: int, layout: ArenaLayout, device: torch.device):
        if not 1 <= ranks <= LAUNCH_RANKS:
            raise UserError(f"one launch carries 1 to {LAUNCH_RANKS} ranks, not {ranks}")
        arenas = [torch.zeros(layout.bytes, dtype=torch.uint8, device=device) for _ in range(ranks)]
        super().__init__(arenas, range(ranks), layout, device)
