"""One planning problem: the lengths and every option, checked once."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Real
from typing import NamedTuple

import numpy as np

from buddyring.lengths import MAX_LENGTH, check_lengths

MAX_RANKS = 2**20  # loads are arrays over all ranks; far beyond any machine


class Layout(NamedTuple):
    """What a scheduler answers: ``groups`` is ``[n, 2]`` int64 (start, size) in input order; ``notes`` are remarks."""

    groups: np.ndarray
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Problem:
    """Checked input of a scheduler. lengths: ``[n]`` int64 tokens in input order; the rest as ``plan`` takes it."""

    lengths: np.ndarray
    ranks: int
    token_tolerance: float
    attention_tolerance: float
    max_group: int
    capacity: int | None
    rank_multiple: int
    tile: int
    exact_tiles: bool
    target: float | None

    @property
    def largest_divisor(self) -> int:
        """Largest power of two that divides the ranks: no aligned group can be larger."""
        return self.ranks & -self.ranks

    @property
    def largest_group(self) -> int:
        """Largest group size that BuddyRing may use: a power of two, divides the ranks, at most ``max_group``."""
        return min(self.largest_divisor, 1 << (self.max_group.bit_length() - 1))

    @property
    def rank_limit(self) -> int | None:
        """Most tokens a rank may hold once its total is rounded up to ``rank_multiple``; None without a capacity."""
        return None if self.capacity is None else self.capacity // self.rank_multiple * self.rank_multiple

    def is_legal(self, lengths: np.ndarray, size: int) -> np.ndarray:
        """``[n]`` bool: which of these lengths may be split over ``size`` ranks.

        At least ``2 * size`` tiles; with ``exact_tiles`` the paper's rule, ``2 * tile * size`` divides the length
        (LiquidCP, appendix A.1). A whole sequence is always legal.
        """
        if size == 1:
            return np.ones(len(lengths), dtype=bool)
        if self.exact_tiles:
            return lengths % (2 * self.tile * size) == 0
        return -(-lengths // self.tile) >= 2 * size


def check_problem(
    lengths: Iterable[int],
    ranks: int,
    *,
    token_tolerance: float,
    attention_tolerance: float,
    max_group: int,
    capacity: int | None,
    rank_multiple: int,
    tile: int,
    exact_tiles: bool,
    target: float | None,
) -> Problem:
    """The problem these options state. Raises TypeError or ValueError naming the first option that is not one."""
    if not isinstance(exact_tiles, bool):
        raise TypeError(f"exact_tiles is {exact_tiles!r}; give True or False")
    problem = Problem(
        lengths=check_lengths(lengths),
        ranks=positive_int("ranks", ranks, MAX_RANKS),
        token_tolerance=real("token_tolerance", token_tolerance),
        attention_tolerance=real("attention_tolerance", attention_tolerance),
        max_group=positive_int("max_group", max_group, MAX_LENGTH),
        capacity=None if capacity is None else positive_int("capacity", capacity),
        rank_multiple=positive_int("rank_multiple", rank_multiple, MAX_LENGTH),
        tile=positive_int("tile", tile, MAX_LENGTH),
        exact_tiles=exact_tiles,
        target=None if target is None else real("target", target),
    )
    if problem.target == 0:
        raise ValueError("target is 0 tokens per rank; give at least 1, or None for half of the mean")
    if problem.rank_limit == 0:
        raise ValueError(
            f"a capacity of {capacity} tokens holds no multiple of rank_multiple {rank_multiple}; "
            "raise the capacity to one multiple at least"
        )
    return problem


def positive_int(name: str, value: object, most: int | None = None) -> int:
    """``value`` as an int of 1 to ``most``; TypeError or ValueError that names it otherwise."""
    try:
        if isinstance(value, (bool, np.bool_)):
            raise TypeError
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{name} is {value!r} ({type(value).__name__}); give an integer of at least 1") from None
    if number < 1:
        raise ValueError(f"{name} is {number}; give at least 1")
    if most is not None and number > most:
        raise ValueError(f"{name} is {number}; give at most {most}")
    return number


def real(name: str, value: object) -> float:
    """``value`` as a finite float of at least 0; TypeError or ValueError that names it otherwise."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, Real):
        raise TypeError(f"{name} is {value!r} ({type(value).__name__}); give a number")
    number = float(value)
    if not math.isfinite(number) or number < 0:
        raise ValueError(f"{name} is {number}; give a finite number of at least 0")
    return number
