"""Sharded and replicated attention projections in the arena.

Every layer has a fixed slot at the end of the arena with room for each of its projections whole, cut by shard first:
the T slices that tensor parallelism makes lie one after the other. This rank's slice is there in every layout, and the
model's parameter is a view of it. Under DP and CP the slot is filled with the slices of the other ranks; under TP and
DOP the units that they would take belong to KV pages. So a replicated layout costs W, not W + W/T.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from megaring.rollout.arena import Arena
from megaring.rollout.ranks import Ranks
from megaring.rollout.shape import ModelShape, Projection

REPLICATED = "replicated_weight"  # name of the non-persistent buffer that holds a replicated projection
_ALIGNMENT = 256  # bytes


@dataclass(frozen=True)
class SlotLayout:
    """Where the projections of one layer lie in its slot. ``offsets``: bytes from the slot's start, by projection."""

    projections: tuple[Projection, ...]
    offsets: tuple[int, ...]
    units: int
    ranks: int
    itemsize: int
    unit_bytes: int

    @classmethod
    def of(cls, shape: ModelShape, ranks: int, itemsize: int, unit_bytes: int) -> SlotLayout:
        """The slot of any layer of ``shape``."""
        offsets, end = [], 0
        for each in shape.projections:
            offsets.append(end)
            end += -(-each.elements * itemsize // _ALIGNMENT) * _ALIGNMENT
        return cls(shape.projections, tuple(offsets), -(-end // unit_bytes), ranks, itemsize, unit_bytes)

    def slice_shape(self, projection: Projection) -> tuple[int, int]:
        """Rows and columns of one slice."""
        rows, columns = projection.rows, projection.columns
        return (rows // self.ranks, columns) if projection.split == 0 else (rows, columns // self.ranks)

    def own_units(self, rank: int) -> NDArray[np.int64]:
        """Units of the slot, from 0, that ``rank``'s slices touch."""
        held = np.zeros(self.units, bool)
        for each, offset in zip(self.projections, self.offsets, strict=True):
            size = each.elements * self.itemsize // self.ranks
            first, last = offset + rank * size, offset + (rank + 1) * size - 1
            held[first // self.unit_bytes : last // self.unit_bytes + 1] = True
        return np.flatnonzero(held)


def replicated_linear(rows: torch.Tensor, module: nn.Module) -> torch.Tensor:
    """Apply a replicated projection that tensor parallelism cuts by columns: ``[n, columns]`` to ``[n, rows]``."""
    slices = module.get_buffer(REPLICATED)  # [T, rows, columns / T]
    parts = rows.chunk(len(slices), dim=1)
    out = functional.linear(parts[0], slices[0])
    for part, weight in zip(parts[1:], slices[1:], strict=True):
        out.addmm_(part, weight.t())
    return out


class Projections:
    """The projections of all layers on this rank. ``modules[layer][name]`` is the Megatron module of a projection."""

    def __init__(
        self, arena: Arena, slot: SlotLayout, modules: list[dict[str, nn.Module]], rank: int, dtype: torch.dtype
    ) -> None:
        self.arena, self.slot, self.modules, self.rank = arena, slot, modules, rank
        if len(modules) * slot.units > arena.units:
            raise ValueError(
                f"the arena has {arena.units} units of {arena.unit_bytes} bytes; whole projections of {len(modules)} "
                f"layers take {len(modules) * slot.units}. Give it more memory"
            )
        self._views = [
            {
                each.name: arena.view(
                    self._start(layer) * arena.unit_bytes + offset, (slot.ranks, *slot.slice_shape(each)), dtype
                )
                for each, offset in zip(slot.projections, slot.offsets, strict=True)
            }
            for layer in range(len(modules))
        ]
        for layer in range(len(modules)):
            arena.claim(self._start(layer) + slot.own_units(rank))
            self._adopt(layer)

    def foreign_units(self, layer: int) -> NDArray[np.int64]:
        """Units of a layer's slot that hold projections only while they are replicated."""
        return self._start(layer) + np.setdiff1d(np.arange(self.slot.units), self.slot.own_units(self.rank))

    def slices(self, layer: int, rank: int) -> list[torch.Tensor]:
        """The slices that ``rank`` holds under tensor parallelism, in place, in the order of the projections."""
        return [self._views[layer][each.name][rank] for each in self.slot.projections]

    def gather(self, layer: int, ranks: Ranks) -> None:
        """Fill the slot of a replicated layer with the slices of the other ranks again; collective."""
        for each in self.slot.projections:
            view = self._views[layer][each.name]
            rows = view.shape[1]
            view.copy_(ranks.gather_rows(view[self.rank], [rows] * ranks.size).view_as(view))

    def expose(self, layer: int) -> None:
        """The slot is full: make the replicated projections buffers of their modules."""
        for name, view in self._views[layer].items():
            self.modules[layer][name].register_buffer(REPLICATED, view, persistent=False)

    def withdraw(self, layer: int) -> None:
        """The slot is about to be given up: nobody can use the replicated projections any more."""
        for module in self.modules[layer].values():
            if REPLICATED in module._buffers:
                delattr(module, REPLICATED)

    def leave(self) -> None:
        """The arena is about to give up its memory: parameters move out of it, replicated copies go."""
        for layer, modules in enumerate(self.modules):
            self.withdraw(layer)
            for module in modules.values():
                module.weight.data = module.weight.data.clone()

    def enter(self) -> None:
        """The arena has its memory again: parameters move into it."""
        for layer in range(len(self.modules)):
            self._adopt(layer)

    def check_adopted(self) -> None:
        """Raise RuntimeError where a parameter no longer lies in the arena, as after ``model.to`` or an assignment."""
        for layer, modules in enumerate(self.modules):
            for name, view in self._views[layer].items():
                if modules[name].weight.data_ptr() != view[self.rank].data_ptr():
                    raise RuntimeError(
                        f"{name} of layer {layer} was replaced by another tensor; copy new weights into the parameters"
                    )

    def _start(self, layer: int) -> int:
        return self.arena.units - (layer + 1) * self.slot.units

    def _adopt(self, layer: int) -> None:
        """Move this rank's parameters into the arena."""
        for each in self.slot.projections:
            parameter, view = self.modules[layer][each.name].weight, self._views[layer][each.name][self.rank]
            if parameter.shape != view.shape or parameter.dtype != view.dtype:
                raise ValueError(
                    f"{each.name} of layer {layer} is {parameter.dtype} {list(parameter.shape)}; over "
                    f"{self.slot.ranks} ranks it should be {view.dtype} {list(view.shape)}"
                )
            view.copy_(parameter.data)
            parameter.data = view
