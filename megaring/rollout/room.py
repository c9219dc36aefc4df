"""What fits into the arenas: the memory rule of a switch (SPLASH, equation 5) and of a step, for all ranks at once.

Everything here is computed from what all ranks know, so that they decide alike.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megaring.rollout.layout import HEADS, Layout
from megaring.rollout.manifest import Manifest
from megaring.rollout.projections import SlotLayout


@dataclass(frozen=True)
class Room:
    """Arenas of ``units`` units on each rank, for ``layers`` layers with projection slots ``slot`` and pages of
    ``groups`` cache head groups. ``reserve``: units that a switch leaves alone.
    """

    units: int
    layers: int
    groups: int
    slot: SlotLayout
    reserve: int = 0

    def page_units(self, layout: Layout) -> int:
        """Units of one page of one layer."""
        return 1 if layout.history == HEADS else self.groups

    def layer_units(self, layout: Layout, pages: NDArray[np.int64]) -> NDArray[np.int64]:
        """Units that one layer takes on each rank with ``pages`` pages there, projections included, ``[ranks]``."""
        return self._projection_units(layout) + pages * self.page_units(layout)

    def total_pages(self, layout: Layout) -> NDArray[np.int64]:
        """Pages, each over all layers, that ranks have room for under ``layout``, ``[ranks]``."""
        left = self.units - self.layers * self._projection_units(layout)
        return np.maximum(left, 0) // (self.layers * self.page_units(layout))

    def shortage(self, layout: Layout, pages: NDArray[np.int64]) -> str | None:
        """Why a layout with ``pages`` pages on each rank does not fit, or None."""
        return self._compare(self.layers * self.layer_units(layout, pages), str(layout))

    def switch_shortage(self, manifest: Manifest, growth: NDArray[np.int64]) -> str | None:
        """Why a switch, with ``growth`` new pages under the destination in its step, has to wait, or None.

        max(M(a), M(b)) + one layer in transit + reserve <= memory, on every rank.
        """
        before = manifest.before.holders(manifest.source).sum(axis=0)
        after = manifest.after.holders(manifest.destination).sum(axis=0) + growth
        old = self.layers * self.layer_units(manifest.source, before)
        new = self.layers * self.layer_units(manifest.destination, after)
        needed = np.maximum(old, new) + self._transit(manifest) + self.reserve
        return self._compare(needed, f"{manifest.source} to {manifest.destination}, one layer in transit included,")

    def _projection_units(self, layout: Layout) -> NDArray[np.int64]:
        ranks = range(self.slot.ranks)
        if layout.sharded_projections:
            return np.array([len(self.slot.own_units(rank)) for rank in ranks], np.int64)
        return np.full(self.slot.ranks, self.slot.units, np.int64)

    def _transit(self, manifest: Manifest) -> NDArray[np.int64]:
        """Units of one layer that ranks fill while they still have the source's, ``[ranks]``."""
        made = np.zeros(manifest.ranks, np.int64)
        width = manifest.shape.cache_heads // self.groups
        for each in manifest.kv_transfers:
            made[each.destination] += len(each.pages) * (len(each.heads) // width)
        if manifest.weight_transfers:
            made += self.slot.units - self._projection_units(manifest.source)
        return made

    def _compare(self, needed: NDArray[np.int64], what: str) -> str | None:
        rank = int(np.argmax(needed))
        if needed[rank] <= self.units:
            return None
        return f"{what} takes {needed[rank]} units on rank {rank}, whose arena has {self.units}"
