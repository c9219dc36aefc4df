"""What travels through a Megatron model beside the hidden states: the step's shards, in a ``PackedSeqParams``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams

import megaring
from megaring.data.microbatch import Microbatch


@dataclass
class ShardParams(PackedSeqParams):
    """The packed-sequence parameters of one microbatch. Build them with ``from_microbatch``.

    Megatron hands this object unchanged through pipeline stages, recomputation and layers to RoPE and core
    attention, which read the fields below. All inherited fields stay None, so that Megatron treats the rows as one
    plain sequence of batch size 1 and leaves positions and masks to them.

    shards: the result of ``megaring.to_device``. positions: ``[rows]`` int64, position of each row inside its
    sequence, 0 on dummies. group: process group of the rank domain. backend, deterministic: for
    ``megaring.attention``.
    """

    shards: Any = None
    positions: torch.Tensor | None = None
    group: dist.ProcessGroup | None = None
    backend: str = "auto"
    deterministic: bool = False

    @classmethod
    def from_microbatch(
        cls,
        batch: Microbatch,
        group: dist.ProcessGroup,
        *,
        backend: str = "auto",
        deterministic: bool = False,
    ) -> ShardParams:
        """The parameters of ``batch``, whose tensors are where the model is."""
        return cls(
            shards=megaring.to_device(batch.shards, batch.tokens.device),
            positions=batch.position_ids[0],
            group=group,
            backend=backend,
            deterministic=deterministic,
        )
