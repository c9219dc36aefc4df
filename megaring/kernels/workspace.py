"""What a backward call needs in its own GPU's memory besides tensors and arena."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megaring.errors import UserError
from megaring.kernels.backward_plan import CHUNK_TILES, QUERY_TILE


@dataclass(frozen=True, eq=False)
class Workspace:
    """Scratch memory of one rank's backward calls; those of one stream can share it, whatever their placements.

    statistics: ``[2, Hq, query tiles * 64]`` float32. query_sums: ``[Hq, query tiles, 64 * D]`` float32, zero between
    calls. counters: ``[2, query chunks, Hq]`` int32, likewise. After a call that had to stop they are no longer zero
    and have to be made anew, as the arena has to.
    """

    statistics: torch.Tensor
    query_sums: torch.Tensor
    counters: torch.Tensor

    @classmethod
    def make(cls, query_tiles: int, query_heads: int, head_dim: int, device: torch.device) -> Workspace:
        """One for calls of up to ``query_tiles`` query tiles: ``4 * D + 8`` bytes per query row and head, about."""
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise UserError(
                "a CUDA graph cannot capture the first fused backward of its size on a stream: run one before the "
                "capture, on the stream that torch.cuda.graph(graph, stream=...) will use"
            )
        rows = query_heads * query_tiles * QUERY_TILE
        return cls(
            torch.empty(2 * rows, dtype=torch.float32, device=device),
            torch.zeros(rows * head_dim, dtype=torch.float32, device=device),
            torch.zeros(2 * -(-query_tiles // CHUNK_TILES) * query_heads, dtype=torch.int32, device=device),
        )

    def fits(self, query_tiles: int, query_heads: int, head_dim: int) -> bool:
        """Whether it is large enough."""
        rows = query_heads * query_tiles * QUERY_TILE
        counters = 2 * -(-query_tiles // CHUNK_TILES) * query_heads
        return (
            self.statistics.numel() >= 2 * rows
            and self.query_sums.numel() >= rows * head_dim
            and self.counters.numel() >= counters
        )
