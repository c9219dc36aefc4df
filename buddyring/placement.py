"""The plan of one step: which aligned group of ranks each sequence lives on, and what that costs."""

from __future__ import annotations

import json
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from buddyring.lengths import MAX_LENGTH, check_lengths
from buddyring.problem import MAX_RANKS, positive_int, real
from buddyring.shards import Shards, build_shards
from buddyring.zigzag import TILE, place_loads

ROUNDING = 1e-12  # a violation below this is a matter of floating point
CLASS_CUTS = (2048, 4096, 8192, 16384)  # tokens; a length on a cut belongs to the lower class


class CapacityError(ValueError):
    """No placement keeps every rank within its capacity, or none was found."""


class Group(NamedTuple):
    """``size`` consecutive ranks from ``start`` on."""

    start: int
    size: int


@dataclass(frozen=True, eq=False)
class Placement:
    """Groups of the sequences of one step on one rank domain. Build it with ``plan`` or ``from_groups``.

    lengths: tokens per sequence, in input order. groups: one ``Group`` per sequence, same order.
    token_loads: tokens each rank really holds (before rounding to ``rank_multiple``).
    attention_loads: causal query-key pairs each rank really computes, counting one head.
    token_imbalance, attention_imbalance: largest absolute relative deviation from the mean (0 without sequences).
    violation: ``max(0, token_imbalance - token_tolerance, attention_imbalance - attention_tolerance)``.
    profile: per length class (up to 2K, 4K, 8K, 16K tokens, longer): (split sequences, summed log2 size).
    communication: sum of ``L * (size - 1) / size``, in tokens.
    num_shards: summed group sizes. aligned: every group is a power of two that divides the ranks and starts at a
    multiple of its size; attention backends refuse other placements.
    Source: LiquidCP, section 4.2; loads of unrounded lengths are counted, not estimated (they equal the paper's
    ``L / size`` and ``L (L + 1) / 2 / size`` wherever its rule ``256 * size | L`` holds).
    """

    lengths: tuple[int, ...]
    ranks: int
    groups: tuple[Group, ...]
    tile: int
    exact_tiles: bool
    token_tolerance: float
    attention_tolerance: float
    capacity: int | None
    rank_multiple: int
    scheduler: str
    notes: tuple[str, ...]
    token_loads: tuple[int, ...]
    attention_loads: tuple[int, ...]
    token_imbalance: float
    attention_imbalance: float
    violation: float
    profile: tuple[tuple[int, int], ...]
    communication: float
    num_shards: int
    aligned: bool
    _shards: dict[int, Shards] = field(default_factory=dict, repr=False)

    @classmethod
    def from_groups(
        cls,
        lengths: Iterable[int],
        ranks: int,
        groups: Iterable[tuple[int, int]],
        *,
        tile: int = TILE,
        exact_tiles: bool = False,
        token_tolerance: float = 0.10,
        attention_tolerance: float = 0.05,
        capacity: int | None = None,
        rank_multiple: int = 1,
        scheduler: str = "given",
        notes: Sequence[str] = (),
    ) -> Placement:
        """The placement that puts sequence ``i`` on ``groups[i]``, with every derived figure.

        Raises TypeError for options of another type; ValueError for options out of range, a group outside the ranks, a
        sequence with fewer than ``2 * size`` tokens, more tokens on a rank than int32 positions count, or another
        number of groups than of lengths; CapacityError when a rank holds more than ``capacity`` tokens.
        """
        length_array = check_lengths(lengths)
        made = tuple(Group(operator.index(start), operator.index(size)) for start, size in groups)
        ranks = positive_int("ranks", ranks, MAX_RANKS)
        tile = positive_int("tile", tile, MAX_LENGTH)
        rank_multiple = positive_int("rank_multiple", rank_multiple, MAX_LENGTH)
        capacity = None if capacity is None else positive_int("capacity", capacity)
        token_tolerance = real("token_tolerance", token_tolerance)
        attention_tolerance = real("attention_tolerance", attention_tolerance)
        if not isinstance(exact_tiles, bool):
            raise TypeError(f"exact_tiles is {exact_tiles!r}; give True or False")
        if not all(isinstance(text, str) for text in (scheduler, *notes)) or isinstance(notes, str):
            raise TypeError(f"scheduler {scheduler!r} must be a string and notes {notes!r} a sequence of strings")
        if len(made) != len(length_array):
            raise ValueError(f"{len(length_array)} lengths but {len(made)} groups; give one group per sequence")
        for index, (start, size) in enumerate(made):
            if size < 1 or start < 0 or start + size > ranks:
                raise ValueError(f"group {index} (start {start}, size {size}) does not lie within {ranks} ranks")
        group_array = np.asarray(made, dtype=np.int64).reshape(-1, 2)
        tokens, pairs = rank_loads(length_array, group_array, ranks, tile)
        if tokens.max(initial=0) > MAX_LENGTH:
            worst = int(tokens.argmax())
            raise ValueError(
                f"rank {worst} would hold {int(tokens[worst])} tokens; a rank holds at most {MAX_LENGTH}: "
                "plan more ranks"
            )
        if capacity is not None:
            rows = -(-tokens // rank_multiple) * rank_multiple
            if rows.max(initial=0) > capacity:
                worst = int(rows.argmax())
                raise CapacityError(
                    f"rank {worst} would hold {int(rows[worst])} tokens, over the capacity of {capacity}; "
                    "raise the capacity or plan more ranks"
                )
        token_imbalance, attention_imbalance = imbalance(tokens), imbalance(pairs)
        violation = max(token_imbalance - token_tolerance, attention_imbalance - attention_tolerance)
        sizes = group_array[:, 1]
        return cls(
            lengths=tuple(length_array.tolist()),
            ranks=ranks,
            groups=made,
            tile=tile,
            exact_tiles=exact_tiles,
            token_tolerance=token_tolerance,
            attention_tolerance=attention_tolerance,
            capacity=capacity,
            rank_multiple=rank_multiple,
            scheduler=scheduler,
            notes=tuple(notes),
            token_loads=tuple(tokens.tolist()),
            attention_loads=tuple(pairs.tolist()),
            token_imbalance=token_imbalance,
            attention_imbalance=attention_imbalance,
            violation=violation if violation > ROUNDING else 0.0,
            profile=splitting_profile(length_array, sizes),
            communication=float((length_array * (sizes - 1) / sizes).sum()),
            num_shards=int(sizes.sum()),
            aligned=all(is_aligned(start, size, ranks) for start, size in made),
        )

    def shards(self, rank: int) -> Shards:
        """What ``rank`` holds of this step; built once and kept."""
        if not 0 <= rank < self.ranks:
            raise ValueError(f"rank {rank} is not one of the {self.ranks} ranks of this placement")
        if rank not in self._shards:
            self._shards[rank] = build_shards(self, rank)
        return self._shards[rank]

    def rows(self, rank: int) -> int:
        """Rows that the model sees on ``rank``: its tokens rounded up to ``rank_multiple``, at least one multiple."""
        return max(1, -(-self.token_loads[rank] // self.rank_multiple)) * self.rank_multiple

    @property
    def num_distinct_groups(self) -> int:
        """Different groups in use."""
        return len(set(self.groups))

    def to_json(self) -> str:
        """One JSON object with the inputs, the groups and the main figures; ``from_json`` reads it back."""
        return json.dumps(
            {
                "ranks": self.ranks,
                "lengths": self.lengths,
                "groups": self.groups,
                "tile": self.tile,
                "exact_tiles": self.exact_tiles,
                "token_tolerance": self.token_tolerance,
                "attention_tolerance": self.attention_tolerance,
                "capacity": self.capacity,
                "rank_multiple": self.rank_multiple,
                "scheduler": self.scheduler,
                "notes": self.notes,
                "token_loads": self.token_loads,
                "attention_loads": self.attention_loads,
                "token_imbalance": self.token_imbalance,
                "attention_imbalance": self.attention_imbalance,
            }
        )

    @classmethod
    def from_json(cls, text: str) -> Placement:
        """The placement that ``to_json`` wrote. Raises ValueError when its loads are not those of its groups."""
        try:
            data = json.loads(text)
            made = cls.from_groups(
                data["lengths"],
                data["ranks"],
                data["groups"],
                tile=data["tile"],
                exact_tiles=data["exact_tiles"],
                token_tolerance=data["token_tolerance"],
                attention_tolerance=data["attention_tolerance"],
                capacity=data["capacity"],
                rank_multiple=data["rank_multiple"],
                scheduler=data["scheduler"],
                notes=data["notes"],
            )
        except (KeyError, TypeError, RecursionError, json.JSONDecodeError) as error:
            raise ValueError(f"not a placement written by to_json: {error!r}") from error
        if list(made.token_loads) != data["token_loads"] or list(made.attention_loads) != data["attention_loads"]:
            raise ValueError("the loads in this placement are not those of its groups; it was edited or cut")
        return made


def is_aligned(start: int, size: int, ranks: int) -> bool:
    """Whether a group is a power of two that divides the ranks and starts at a multiple of its size."""
    return size & (size - 1) == 0 and ranks % size == 0 and start % size == 0


def rank_loads(lengths: np.ndarray, groups: np.ndarray, ranks: int, tile: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and causal query-key pairs per rank: two ``[ranks]`` int64 arrays.

    lengths: ``[n]`` int64. groups: ``[n, 2]`` int64 (start, size).
    """
    tokens, pairs = np.zeros(ranks, dtype=np.int64), np.zeros(ranks, dtype=np.int64)
    for size in np.unique(groups[:, 1]).tolist():
        chosen = groups[:, 1] == size
        members = groups[chosen, :1] + np.arange(size)
        held, work = place_loads(lengths[chosen], size, tile)
        np.add.at(tokens, members, held)
        np.add.at(pairs, members, work)
    return tokens, pairs


def imbalance(loads: np.ndarray) -> float:
    """Largest absolute deviation from the mean, relative to it; 0 when there is no load."""
    total = sum(loads.tolist())  # may exceed int64
    if total == 0:
        return 0.0
    mean = total / len(loads)
    return max(int(loads.max()) - mean, mean - int(loads.min())) / mean


def splitting_profile(lengths: np.ndarray, sizes: np.ndarray) -> tuple[tuple[int, int], ...]:
    """Per length class, shortest first: (sequences with size > 1, sum of log2 size). LiquidCP, section 4.2."""
    classes = np.searchsorted(CLASS_CUTS, lengths, side="left")
    logs = np.ceil(np.log2(np.maximum(sizes, 1))).astype(np.int64)
    return tuple(
        (int(((sizes > 1) & (classes == c)).sum()), int(logs[classes == c].sum())) for c in range(len(CLASS_CUTS) + 1)
    )
