"""The one byte arena of a rank: equal units, each free, a piece of a KV page, or part of a projection.

A unit holds one layer's page of 64 tokens for one group of cache heads, of which TP makes h = min(T, H_kv). So a page
is one unit under TP and h units elsewhere, a unit that is needed before and after a switch stays where it is, and
nothing fragments. Projections need contiguous room: they have fixed places at the end (see ``projections``), from which
pages move when a projection comes back.
"""

from __future__ import annotations

import heapq

import numpy as np
import torch
from numpy.typing import NDArray

from megaring.rollout.uploads import upload

_FREE, _PAGE, _WEIGHTS = 0, 1, 2


class OutOfUnits(RuntimeError):
    """More units are wanted than are free."""


class Arena:
    """``units`` units of ``unit_bytes`` bytes on ``device``; the lowest free ones are given out first.

    ``peak`` is the most units that have been in use at once.
    """

    def __init__(self, units: int, unit_bytes: int, device: torch.device) -> None:
        if units < 1:
            raise ValueError(f"an arena of {units} units; at least 1 is needed")
        self.units, self.unit_bytes = units, unit_bytes
        self.bytes = torch.zeros(units * unit_bytes, dtype=torch.uint8, device=device)
        self._state = np.full(units, _FREE, np.uint8)
        self._heap = list(range(units))  # of free units, and of some that a claim has taken since
        self._listed = np.ones(units, bool)  # whether a unit is on the heap
        self.free, self.peak = units, 0

    @property
    def used(self) -> int:
        """Units in use."""
        return self.units - self.free

    def take(self, count: int) -> NDArray[np.int64]:
        """The ``count`` lowest free units, for pages. Raises OutOfUnits."""
        if count > self.free:
            raise OutOfUnits(f"{count} units of {self.unit_bytes} bytes are wanted, {self.free} of {self.units} free")
        found: list[int] = []
        while len(found) < count:
            unit = heapq.heappop(self._heap)
            self._listed[unit] = False
            if self._state[unit] == _FREE:
                found.append(unit)
        made = np.array(found, np.int64)
        self._use(made, _PAGE)
        return made

    def give_back(self, units: NDArray[np.int64]) -> None:
        """Free units in use."""
        if (self._state[units] == _FREE).any():
            raise RuntimeError("a unit that is free already was given back")
        self._state[units] = _FREE
        self.free += len(units)
        for unit in units[~self._listed[units]].tolist():
            heapq.heappush(self._heap, unit)
        self._listed[units] = True

    def pages_in(self, units: NDArray[np.int64]) -> NDArray[np.int64]:
        """Those of ``units`` that hold pages."""
        return units[self._state[units] == _PAGE]

    def claim(self, units: NDArray[np.int64]) -> None:
        """Use these very units, which must be free, for projections."""
        if (self._state[units] != _FREE).any():
            raise RuntimeError("units that are in use were claimed for projections")
        self._use(units, _WEIGHTS)

    def copy(self, source: NDArray[np.int64], destination: NDArray[np.int64]) -> None:
        """Copy the bytes of units to other ones."""
        rows = self.bytes.view(self.units, self.unit_bytes)
        rows[upload(destination, rows.device)] = rows[upload(source, rows.device)]

    def give_up(self) -> None:
        """Return the memory to the allocator. Views stay, but must not be used until ``take_back``."""
        self.bytes.untyped_storage().resize_(0)

    def take_back(self) -> None:
        """Have the memory again, with undefined content; nothing is read before it is written."""
        self.bytes.untyped_storage().resize_(self.units * self.unit_bytes)

    def view(self, first_byte: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor that lies at ``first_byte``, a multiple of its element size."""
        count = int(np.prod(shape)) * dtype.itemsize
        return self.bytes[first_byte : first_byte + count].view(dtype).view(shape)

    def _use(self, units: NDArray[np.int64], state: int) -> None:
        self._state[units] = state
        self.free -= len(units)
        self.peak = max(self.peak, self.used)
