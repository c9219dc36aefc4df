"""Which packed query rows meet which packed key rows in one call of a local kernel."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from megaring.device_shards import array_to_device


@dataclass(frozen=True, eq=False)
class Segments:
    """Segment ``i`` pairs queries ``[cu_q[i], cu_q[i + 1])`` with keys ``[cu_k[i], cu_k[i + 1])``. Use ``build``.

    lengths_q, lengths_k: ``n`` counts on the host, each at least 1: library kernels disagree about empty segments
    (some return LSE +inf), so there are none. cu_q, cu_k: ``[n + 1]`` int32 on the device. max_q, max_k: longest.
    """

    lengths_q: tuple[int, ...]
    lengths_k: tuple[int, ...]
    cu_q: torch.Tensor
    cu_k: torch.Tensor
    max_q: int
    max_k: int

    @classmethod
    def build(cls, lengths_q: np.ndarray, lengths_k: np.ndarray, device: torch.device) -> Segments:
        """Segments of the given integer lengths. Raises ValueError for an empty one."""
        if min(lengths_q.min(initial=1), lengths_k.min(initial=1)) < 1:
            raise ValueError("a segment without queries or keys is not allowed")
        return cls(
            lengths_q=tuple(lengths_q.tolist()),
            lengths_k=tuple(lengths_k.tolist()),
            cu_q=_cumulative(lengths_q, device),
            cu_k=_cumulative(lengths_k, device),
            max_q=int(lengths_q.max(initial=0)),
            max_k=int(lengths_k.max(initial=0)),
        )


def _cumulative(lengths: np.ndarray, device: torch.device) -> torch.Tensor:
    bounds = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=bounds[1:])
    return array_to_device(bounds, device)
