"""Rotary position embedding at global positions, as Megatron applies it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import nn

_BLOCK = 4096  # positions


class Rotation:
    """How positions turn heads: ``frequencies`` ``[width / 2]`` in fp32, and ``scale`` of cosines and sines (YaRN).

    ``interleaved``: the two coordinates are neighbours, as in MLA, and come out as halves; else they are halves.
    Angles, cosines and sines are in fp32, as in training, and are computed in blocks of fixed shape: vectorised and
    scalar code differ in the last bit, and a position's values must not depend on what else is in a step.
    """

    def __init__(self, frequencies: torch.Tensor, scale: float = 1.0, *, interleaved: bool = False) -> None:
        self._frequencies, self._scale, self.interleaved = frequencies.float(), scale, interleaved
        self._tables: tuple[torch.Tensor, torch.Tensor] | None = None  # [positions, 1, width]

    @classmethod
    def of(cls, embedding: nn.Module, *, interleaved: bool = False) -> Self:
        """That of a model's ``RotaryEmbedding`` or ``YarnRotaryEmbedding``."""
        if not hasattr(embedding, "scaling_factor"):
            return cls(embedding.inv_freq, interleaved=interleaved)
        angles, scale = embedding.get_emb(2)  # at positions 0 and 1: the latter are the frequencies
        return cls(angles[1].flatten()[: angles.shape[-1] // 2], scale, interleaved=interleaved)

    def at(self, positions: torch.Tensor, largest: int, dtype: torch.dtype) -> Rotary:
        """The tables of rows at ``positions`` (``[n]`` int64), the largest of which is ``largest``."""
        cos, sin = self.tables(largest, positions.device, dtype)
        return Rotary(cos[positions], sin[positions], self.interleaved)

    def tables(self, largest: int, device: torch.device, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines ``[positions, 1, width]``, at least up to position ``largest``."""
        known = len(self._tables[0]) if self._tables else 0
        if largest >= known or self._tables[0].dtype != dtype or self._tables[0].device != device:
            last = max(largest, 2 * known - 1) if known else largest  # a history that grows makes few tables
            blocks = [self._block(first, device) for first in range(0, last + 1, _BLOCK)]
            self._tables = tuple(torch.cat(each).to(dtype) for each in zip(*blocks, strict=True))
        return self._tables

    def _block(self, first: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        positions = torch.arange(first, first + _BLOCK, device=device).float()
        angles = torch.outer(positions, self._frequencies.to(device))
        angles = torch.cat((angles, angles), dim=-1)[:, None]
        return angles.cos() * self._scale, angles.sin() * self._scale


@dataclass(frozen=True, eq=False)
class Rotary:
    """``cos``, ``sin``: ``[n, 1, width]`` of n rows, in the type of the model."""

    cos: torch.Tensor
    sin: torch.Tensor
    interleaved: bool

    def rows(self, index: torch.Tensor) -> Rotary:
        """The tables of some of the rows."""
        return Rotary(self.cos[index], self.sin[index], self.interleaved)

    def __call__(self, heads: torch.Tensor) -> torch.Tensor:
        """Rotate ``[n, heads, width]`` (RoFormer, https://arxiv.org/abs/2104.09864, section 3.2.2)."""
        if self.interleaved:
            heads = torch.cat((heads[..., 0::2], heads[..., 1::2]), dim=-1)
        first, second = heads.chunk(2, dim=-1)
        return heads * self.cos + torch.cat((-second, first), dim=-1) * self.sin
