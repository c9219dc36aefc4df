"""The KV pages of one rank: block tables per layer, appends, reads and moves, in units of the arena."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from megaring.rollout.arena import Arena, OutOfUnits
from megaring.rollout.layout import PAGE
from megaring.rollout.shape import ModelShape
from megaring.rollout.uploads import upload

ABSENT = -1


@dataclass(frozen=True)
class EntryShape:
    """What the cache keeps of one token and layer: ``planes`` (key and value, or the latent) x ``heads`` x ``width``,
    the heads in ``groups`` equal groups. ``value_width``: leading elements of the last plane that are values.
    """

    planes: int
    heads: int
    width: int
    groups: int
    value_width: int

    @classmethod
    def of(cls, shape: ModelShape, ranks: int) -> EntryShape:
        """The entries of a model over ``ranks`` ranks."""
        planes = 2 if shape.mla is None else 1
        width = shape.head_dim if shape.mla is None else shape.query_width
        return cls(planes, shape.cache_heads, width, shape.head_split(ranks), shape.result_width)

    @property
    def group_heads(self) -> int:
        """Heads of one group."""
        return self.heads // self.groups

    def unit_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of a unit: one group of one page."""
        return self.planes * self.group_heads * PAGE * self.width * dtype.itemsize


class Pages:
    """Block tables ``[layers, slots, groups]`` of units, ``ABSENT`` where this rank does not hold a group of a page.

    A unit is laid out ``[planes, group heads, 64, width]``, and ``units`` is the arena as such. Slots are the ledger's.
    """

    def __init__(self, arena: Arena, entry: EntryShape, layers: int, dtype: torch.dtype) -> None:
        self.arena, self.entry, self.dtype = arena, entry, dtype
        self.table = np.full((layers, 0, entry.groups), ABSENT, np.int64)
        self._place = np.full((arena.units, 3), ABSENT, np.int64)  # (layer, slot, group) of a unit
        self.units = arena.bytes.view(dtype).view(arena.units, entry.planes, entry.group_heads, PAGE, entry.width)
        self._mirror: torch.Tensor | None = None  # the tables on the device, int32, with room for more slots
        self._changed: list[NDArray[np.int64]] = []  # [3, n] cells that the mirror does not have yet

    def reserve_slots(self, count: int) -> None:
        """Make room in the tables for slots below ``count``."""
        layers, known, groups = self.table.shape
        if count > known:
            more = np.full((layers, count - known, groups), ABSENT, np.int64)
            self.table = np.concatenate([self.table, more], axis=1)

    def allocate(self, layer: int, slots: NDArray[np.int64], groups: range) -> None:
        """Give every slot a unit for each of ``groups`` where it has none yet."""
        cells = self.table[layer][np.ix_(slots, groups)] == ABSENT
        rows, columns = np.nonzero(cells)
        self.place(layer, slots[rows], groups.start + columns, self.arena.take(len(rows)))

    def place(self, layer: int, slots: NDArray[np.int64], groups: NDArray[np.int64], units: NDArray[np.int64]) -> None:
        """Enter units in the table of a layer."""
        self.table[layer, slots, groups] = units
        self._place[units] = np.stack([np.full_like(units, layer), slots, groups], axis=1)
        self._note(self._place[units])

    def free(self, layer: int, slots: NDArray[np.int64], keep: range = range(0)) -> None:
        """Free the units of ``slots`` but for the groups in ``keep``."""
        gone = [group for group in range(self.entry.groups) if group not in keep]
        cells = np.ix_(slots, gone)
        units = self.table[layer][cells]
        self.arena.give_back(units[units != ABSENT])
        self.table[layer][cells] = ABSENT

    def evacuate(self, units: NDArray[np.int64]) -> None:
        """Move the pages in ``units`` to other places, and leave all of ``units`` claimed for projections.

        On a GPU this belongs on the stream of the step, whose tables it changes.
        """
        occupied = self.arena.pages_in(units)
        places = self._place[occupied]
        if len(units) > self.arena.free:
            raise OutOfUnits(f"a projection needs {len(units)} units and {self.arena.free} are free")
        self.arena.give_back(occupied)
        self.arena.claim(units)
        fresh = self.arena.take(len(occupied))
        self.arena.copy(occupied, fresh)
        self.table[places[:, 0], places[:, 1], places[:, 2]] = fresh
        self._place[fresh] = places
        self._note(places)

    def copy_page(self, layer: int, source: int, destination: int) -> None:
        """Copy what this rank holds of a page, in all groups that both slots have."""
        old, new = self.table[layer, source], self.table[layer, destination]
        both = (old != ABSENT) & (new != ABSENT)
        self.arena.copy(old[both], new[both])

    def append(
        self, layer: int, slots: NDArray[np.int64], offsets: NDArray[np.int64], groups: range, entries: torch.Tensor
    ) -> None:
        """Write tokens at ``slots``, ``offsets`` ``[n]``. entries: ``[n, planes, heads of groups, width]``."""
        units = self.table[layer][np.ix_(slots, groups)]
        values = entries.unflatten(2, (len(groups), self.entry.group_heads)).transpose(1, 2)
        self.write(units, np.broadcast_to(offsets[:, None], units.shape), values)

    def write(self, units: NDArray[np.int64], offsets: NDArray[np.int64], values: torch.Tensor) -> None:
        """Write tokens ``[..., planes, group heads, width]`` at (unit, offset) pairs of the leading shape."""
        self.units[self._index(units), :, :, self._index(offsets)] = values

    def device_units(self, layer: int, groups: range, slots: torch.Tensor) -> torch.Tensor:
        """Units of a layer's pages at ``slots [...]``, int32 on the device: int32 ``[..., groups]``."""
        table = self.device_table()[layer, :, groups.start : groups.stop]
        return table.index_select(0, slots.flatten()).view(*slots.shape, len(groups))

    def device_table(self) -> torch.Tensor:
        """The tables on the device with the changes so far, int32 ``[layers, slots, groups]``, with room for more
        slots. Where a page is not held, what it says is undefined.
        """
        layers, known, _ = self.table.shape
        if self._mirror is None or self._mirror.shape[1] < known:
            slots = max(64, self.arena.units // layers, 2 * known)
            room = np.full((layers, slots, self.entry.groups), ABSENT, np.int32)
            room[:, :known] = self.table
            self._mirror, self._changed = upload(room, self.arena.bytes.device), []
        elif self._changed:
            cells = np.concatenate(self._changed)
            units = self.table[cells[:, 0], cells[:, 1], cells[:, 2]]
            moved = upload(np.concatenate([cells.T, units[None]]), self.arena.bytes.device)
            self._mirror[moved[0], moved[1], moved[2]] = moved[3].int()
            self._changed = []
        return self._mirror

    def read_tokens(self, units: NDArray[np.int64], offsets: NDArray[np.int64]) -> torch.Tensor:
        """Tokens ``[n, planes, group heads, width]`` at (unit, offset) pairs ``[n]``."""
        return self.units[self._index(units), :, :, self._index(offsets)]

    def read(self, layer: int, slots: NDArray[np.int64], groups: range, tokens: int) -> torch.Tensor:
        """The first ``tokens`` tokens of consecutive pages: ``[planes, heads of groups, tokens, width]``."""
        units = self.table[layer][np.ix_(slots, groups)]
        pages = self.units[self._index(units)]  # [pages, groups, planes, group heads, 64, width]
        heads = len(groups) * self.entry.group_heads
        joined = pages.permute(2, 1, 3, 0, 4, 5).reshape(self.entry.planes, heads, -1, self.entry.width)
        return joined[:, :, :tokens]

    def read_padded(self, layer: int, slots: NDArray[np.int64], groups: range) -> torch.Tensor:
        """All of the pages ``slots [n, p]``: ``[planes, n, heads of groups, p * 64, width]``."""
        units = self.table[layer][slots][:, :, list(groups)]
        pages = self.units[self._index(units)]  # [n, p, groups, planes, group heads, 64, width]
        heads = len(groups) * self.entry.group_heads
        joined = pages.permute(3, 0, 2, 4, 1, 5, 6)
        return joined.reshape(self.entry.planes, len(slots), heads, slots.shape[1] * PAGE, self.entry.width)

    def _note(self, cells: NDArray[np.int64]) -> None:
        """``[n, 3]`` cells have new units. (Absent ones keep their old unit in the mirror: nobody reads it.)"""
        if self._mirror is not None:
            self._changed.append(cells)

    def _index(self, array: NDArray[np.int64]) -> torch.Tensor:
        return upload(array, self.units.device)
