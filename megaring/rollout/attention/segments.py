"""Which cached tokens the new tokens of a step see on this rank: as a list, and as tensors that all layers share."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from megaring.rollout.layout import PAGE
from megaring.rollout.pages import Pages
from megaring.rollout.uploads import upload


@dataclass(frozen=True, eq=False)
class Segment:
    """New tokens of one request and the cached pages that they see on this rank.

    ``rows``: of the queries. ``start``: position of the first. ``slots``: ``[p]`` pages held here, in order of
    positions; ``indices``: ``[p]`` their places in the request. ``length``: cached tokens, the new ones included.
    """

    rows: slice
    start: int
    slots: NDArray[np.int64]
    indices: NDArray[np.int64]
    length: int

    @property
    def count(self) -> int:
        """New tokens."""
        return self.rows.stop - self.rows.start

    @property
    def tokens(self) -> int:
        """Cached tokens in the pages here; only the last page of a request can be partly filled."""
        if not len(self.indices):
            return 0
        return (len(self.indices) - 1) * PAGE + min(PAGE, self.length - PAGE * int(self.indices[-1]))

    def key_positions(self) -> NDArray[np.int64]:
        """Positions of these tokens, ``[tokens]``."""
        return (self.indices[:, None] * PAGE + np.arange(PAGE)).reshape(-1)[: self.tokens]


@dataclass(frozen=True, eq=False)
class Singles:
    """Segments of one new token: block tables of slots and lengths, in tensors on the device.

    ``rows``: int64 ``[b]`` of the queries, or None for all of them in order. ``slots``: int32 ``[b, pages]``, of which
    a row has as many as its tokens take. ``lengths``: int32 ``[b]`` tokens held here. ``ends``: int32 ``[b]``, pages of
    the rows so far.
    """

    rows: torch.Tensor | None
    slots: torch.Tensor
    lengths: torch.Tensor
    ends: torch.Tensor

    def units(self, pages: Pages, layer: int, groups: range) -> torch.Tensor:
        """Block tables of a layer, int32 ``[b, pages, groups]``."""
        return pages.device_units(layer, groups, self.slots)


@dataclass(frozen=True, eq=False)
class Chunks:
    """Segments of several new tokens: ``slots`` as in ``Singles``; ``segments`` int32 ``[s, 4]``: first row, tokens,
    position of the first and cached tokens held here. ``counts``: tokens of each, on the host.
    """

    slots: torch.Tensor
    segments: torch.Tensor
    counts: tuple[int, ...]

    def units(self, pages: Pages, layer: int, groups: range) -> torch.Tensor:
        """Block tables of a layer, int32 ``[s, pages, groups]``."""
        return pages.device_units(layer, groups, self.slots)


class Segments:
    """The segments of a step on ``device``. Where positions are split, page p of a request is on the ``shard`` that
    ``p % shards`` names, and ``Segment.indices`` are ``shard, shard + shards, ...``.
    """

    def __init__(
        self, segments: Iterable[Segment], device: torch.device | str = "cpu", *, shard: int = 0, shards: int = 1
    ) -> None:
        self.items = [each for each in segments if each.count]
        self.device, self.shard, self.shards = torch.device(device), shard, shards

    @cached_property
    def singles(self) -> Singles | None:
        """Those of one token; rows without a page here are among them. None where there are none."""
        some = [each for each in self.items if each.count == 1]
        if not some:
            return None
        rows = np.array([each.rows.start for each in some], np.int64)
        lengths = np.array([each.tokens for each in some], np.int32)
        ordered = len(some) == len(self.items) and (rows == np.arange(len(rows))).all()
        ends = np.cumsum(-(-lengths // PAGE), dtype=np.int32)
        return Singles(
            None if ordered else upload(rows, self.device),
            upload(_table(some), self.device),
            upload(lengths, self.device),
            upload(ends, self.device),
        )

    @cached_property
    def chunks(self) -> Chunks | None:
        """Those of several tokens. None where there are none."""
        some = [each for each in self.items if each.count > 1]
        if not some:
            return None
        facts = [(each.rows.start, each.count, each.start, each.tokens) for each in some]
        return Chunks(
            upload(_table(some), self.device),
            upload(np.array(facts, np.int32), self.device),
            tuple(each.count for each in some),
        )


def _table(segments: list[Segment]) -> NDArray[np.int32]:
    """``[s, most pages]`` slots, at least one column wide."""
    made = np.zeros((len(segments), max(1, *(len(each.slots) for each in segments))), np.int32)
    for row, each in zip(made, segments, strict=True):
        row[: len(each.slots)] = each.slots
    return made
