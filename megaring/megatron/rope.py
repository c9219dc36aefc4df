"""Rotary embedding at the positions that the plan gives each token."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

from megaring.megatron.params import ShardParams


class ShardRotaryEmbedding(RotaryEmbedding):
    """Takes the place of ``GPTModel.rotary_pos_emb`` after construction; it has no parameters.

    Megatron's own cuts one table of positions by the static context-parallel size, which cannot serve sequences on
    groups of different sizes. ``GPTModel`` asks ``get_rotary_seq_len`` with the packed-sequence parameters right before
    it calls ``forward`` without them; so the former keeps the positions for the latter.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._positions: torch.Tensor | None = None

    def get_rotary_seq_len(self, *args: Any, **kwargs: Any) -> int:
        """Remember the positions of this microbatch; the length itself means nothing here."""
        params = kwargs.get("packed_seq_params", args[-1] if args else None)
        if not isinstance(params, ShardParams):
            raise TypeError("this model takes packed_seq_params=ShardParams; see megaring.megatron.params")
        self._positions = params.positions
        return len(params.positions)

    def forward(
        self, max_seq_len: int, offset: int = 0, packed_seq: bool = False, cp_group: Any = None
    ) -> torch.Tensor:
        """Angles ``[rows, 1, 1, kv_channels]`` in fp32, halves repeated, as Megatron's (fused) RoPE takes them."""
        positions, self._positions = self._positions, None
        self.inv_freq = self.inv_freq.to(positions.device)
        angles = torch.outer(positions.to(self.inv_freq.dtype), self.inv_freq)
        return torch.cat((angles, angles), dim=-1)[:, None, None, :]
