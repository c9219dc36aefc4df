"""Rotary position embedding at global positions, as Megatron applies it."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class Rotary:
    """``cos``, ``sin``: ``[n, 1, width]`` of n rows, in the type of the model."""

    cos: torch.Tensor
    sin: torch.Tensor

    @classmethod
    def at(cls, positions: torch.Tensor, inverse_frequencies: torch.Tensor, dtype: torch.dtype) -> Rotary:
        """The tables of rows at ``positions`` (``[n]`` int64). Angles are in the type of the frequencies, fp32, as in
        training; they limit how far positions may go, not this.
        """
        frequencies = inverse_frequencies.to(positions.device)
        angles = torch.outer(positions.to(frequencies.dtype), frequencies)
        angles = torch.cat((angles, angles), dim=-1)[:, None]
        return cls(angles.cos().to(dtype), angles.sin().to(dtype))

    def rows(self, index: torch.Tensor) -> Rotary:
        """The tables of some of the rows."""
        return Rotary(self.cos[index], self.sin[index])

    def __call__(self, heads: torch.Tensor) -> torch.Tensor:
        """Rotate ``[n, heads, width]``: its halves are the two coordinates (RoFormer, section 3.2.2)."""
        first, second = heads.chunk(2, dim=-1)
        return heads * self.cos + torch.cat((-second, first), dim=-1) * self.sin
