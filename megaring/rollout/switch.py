"""Carry out a manifest on one rank, layer by layer, while the requests live on (SPLASH, section 4).

``launch`` makes room for what a layer lacks, packs what others lack and starts the exchange; ``commit`` waits for it,
puts everything in place and gives back what the destination does not need. One layer is in transit at a time, so no
rank ever holds more than the larger of the two layouts and one layer. (Packed messages lie outside the arena.)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from megaring.rollout.arena import Arena
from megaring.rollout.layout import HEADS, Layout
from megaring.rollout.manifest import Manifest
from megaring.rollout.pages import Pages
from megaring.rollout.projections import Projections
from megaring.rollout.ranks import Ranks, Transit
from megaring.rollout.transfer import KvTransfer


@dataclass(frozen=True, eq=False)
class State:
    """Everything on one rank that a layout places."""

    ranks: Ranks
    arena: Arena
    pages: Pages
    projections: Projections

    def groups(self, layout: Layout) -> range:
        """The cache head groups of every page that this rank holds under ``layout``."""
        return held_groups(layout, self.ranks.rank, self.ranks.size, self.pages.entry.groups)


def held_groups(layout: Layout, rank: int, ranks: int, groups: int) -> range:
    """The cache head groups of every page that ``rank`` holds under ``layout``."""
    if layout.history != HEADS:
        return range(groups)
    group = rank * groups // ranks
    return range(group, group + 1)


class Switch:
    """One switch under way. ``slots``: of the pages in the manifest's table."""

    def __init__(self, manifest: Manifest, slots: NDArray[np.int64], state: State) -> None:
        self.manifest, self._slots, self._state = manifest, slots, state
        rank = state.ranks.rank
        self._sends = [each for each in manifest.kv_transfers if each.source == rank]
        self._receives = [each for each in manifest.kv_transfers if each.destination == rank]
        self._gathers = bool(manifest.weight_transfers)
        holders = manifest.after.holders(manifest.destination)[:, rank]
        self._needed, self._surplus = slots[holders], slots[~holders]
        self._transit: Transit | None = None
        self._incoming: list[NDArray[np.int64]] = []

    def launch(self, layer: int) -> None:
        """Start the transfer of a layer. Its history must be complete."""
        state, manifest = self._state, self.manifest
        if self._transit is not None:
            raise RuntimeError(f"layer {layer} was launched while another is in transit")
        if self._gathers:
            state.pages.evacuate(state.projections.foreign_units(layer))
        self._incoming = [state.arena.take(len(each.pages) * len(self._groups(each))) for each in self._receives]
        own = [_bytes(each) for each in state.projections.slices(layer, state.ranks.rank)] if self._gathers else []
        sent = []
        for rank in range(state.ranks.size):
            parts = own if rank != state.ranks.rank else []
            parts = parts + [_bytes(self._read(layer, each)) for each in self._sends if each.destination == rank]
            sent.append(torch.cat(parts) if parts else state.arena.bytes[:0])
        counts = [0] * state.ranks.size
        for each in (*manifest.weight_transfers, *self._receives):
            if each.destination == state.ranks.rank:
                counts[each.source] += each.bytes
        self._transit = state.ranks.start_exchange(sent, counts)

    def complete(self) -> None:
        """Move all layers, one after the other."""
        for layer in range(self.manifest.shape.layers):
            self.launch(layer)
            self.commit(layer)

    @property
    def launched(self) -> bool:
        """Whether a layer is in transit."""
        return self._transit is not None

    def cancel(self, layer: int) -> None:
        """Drop a launched layer: it stays in the source layout."""
        if self._transit is None:
            raise RuntimeError(f"layer {layer} was not launched")
        self._transit.wait()
        self._transit = None
        for units in self._incoming:
            self._state.arena.give_back(units)
        if self._gathers:
            self._state.arena.give_back(self._state.projections.foreign_units(layer))

    def commit(self, layer: int) -> None:
        """Finish a launched layer: from now on it is in the destination layout."""
        state, manifest = self._state, self.manifest
        if self._transit is None:
            raise RuntimeError(f"layer {layer} was not launched")
        received = self._transit.wait()
        self._transit = None
        for each in manifest.weight_transfers:
            if each.destination == state.ranks.rank:
                received[each.source] = self._fill(layer, each.source, received[each.source])
        for each, units in zip(self._receives, self._incoming, strict=True):
            part, received[each.source] = received[each.source].tensor_split([each.bytes])
            self._write(layer, each, units, part)
        groups = state.groups(manifest.destination)
        state.pages.free(layer, self._needed, keep=groups)
        state.pages.free(layer, self._surplus)
        if not manifest.destination.sharded_projections:
            state.projections.expose(layer)
        elif not manifest.source.sharded_projections:
            state.projections.withdraw(layer)
            state.arena.give_back(state.projections.foreign_units(layer))

    def _groups(self, transfer: KvTransfer) -> range:
        width = self._state.pages.entry.group_heads
        return range(transfer.heads.start // width, transfer.heads.stop // width)

    def _tokens(self, transfer: KvTransfer) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Of every live token of a transfer: the number of its page there, and its offset in the page."""
        counts = self.manifest.before.tokens[transfer.pages]
        pages = np.repeat(np.arange(len(counts)), counts)
        return pages, np.arange(len(pages)) - np.repeat(np.cumsum(counts) - counts, counts)

    def _read(self, layer: int, transfer: KvTransfer) -> torch.Tensor:
        pages, offsets = self._tokens(transfer)
        slots, groups = self._slots[transfer.pages], self._groups(transfer)
        units = self._state.pages.table[layer][np.ix_(slots, groups)].T[:, pages].reshape(-1)
        return self._state.pages.read_tokens(units, np.tile(offsets, len(groups)))

    def _write(self, layer: int, transfer: KvTransfer, units: NDArray[np.int64], part: torch.Tensor) -> None:
        state, (pages, offsets) = self._state, self._tokens(transfer)
        slots, groups = self._slots[transfer.pages], self._groups(transfer)
        entry, grid = state.pages.entry, units.reshape(len(groups), len(slots))
        values = part.clone().view(state.pages.dtype).view(-1, entry.planes, entry.group_heads, entry.width)
        state.pages.write(grid[:, pages].reshape(-1), np.tile(offsets, len(groups)), values)
        state.pages.place(layer, np.tile(slots, len(groups)), np.repeat(np.array(groups), len(slots)), units)

    def _fill(self, layer: int, source: int, received: torch.Tensor) -> torch.Tensor:
        """Put another rank's slices in place; returns what of its message is left."""
        for place in self._state.projections.slices(layer, source):
            size = place.numel() * place.element_size()
            place.copy_(received[:size].clone().view(place.dtype).view(place.shape))
            received = received[size:]
        return received


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)
