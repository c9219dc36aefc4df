"""A long list of lengths as training steps: what happens to overlong sequences, and which share a step."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import numpy as np

WINDOW = 64  # sequences that wait at a time

OVERLONG = ("error", "truncate", "split")


def fit_length(lengths: np.ndarray, longest: int, overlong: str) -> np.ndarray:
    """``lengths`` (``[n]`` int64, tokens) with none above ``longest``.

    overlong: ``error`` refuses, ``truncate`` cuts to ``longest``, ``split`` makes pieces of ``longest`` and a rest,
    each a sequence of its own. Raises ValueError that names the first offender, or for an unknown policy.
    """
    if overlong not in OVERLONG:
        raise ValueError(f"unknown overlong policy {overlong!r}; there are {', '.join(OVERLONG)}")
    over = np.flatnonzero(lengths > longest)
    if not over.size:
        return lengths
    if overlong == "error":
        raise ValueError(
            f"sequence {over[0]} has {lengths[over[0]]} tokens, over the {longest} of one sequence "
            f"({over.size} of {len(lengths)} are longer); truncate or split them, or allow longer ones"
        )
    if overlong == "truncate":
        return np.minimum(lengths, longest)
    whole, rest = np.divmod(lengths, longest)
    pieces = whole + (rest > 0)
    made = np.full(int(pieces.sum()), longest, dtype=np.int64)
    made[(np.cumsum(pieces) - 1)[rest > 0]] = rest[rest > 0]
    return made


def split_steps(lengths: Iterable[int], budget: int, window: int = WINDOW) -> list[list[int]]:
    """Indices of the sequences of each step, none of which holds more than ``budget`` tokens.

    First-fit over a bounded window: ``window`` sequences wait, oldest first. A step takes, oldest first, each one that
    still fits, the window fills up from the list, and the step ends when nothing in the window fits. What waits comes
    first in the next step. Raises ValueError for a sequence over the budget.
    """
    incoming = iter(enumerate(int(x) for x in lengths))
    waiting: deque[tuple[int, int]] = deque()
    steps: list[list[int]] = []
    while True:
        left, step = budget, []
        passed: deque[tuple[int, int]] = deque()  # waiting, but too long for what is left of this step
        while len(passed) < window:
            item = waiting.popleft() if waiting else next(incoming, None)
            if item is None:
                break
            index, length = item
            if length > budget:
                raise ValueError(f"sequence {index} has {length} tokens, over the budget of {budget} per step")
            if length <= left:
                step.append(index)
                left -= length
            else:
                passed.append(item)
            if not left:
                break
        if not step:
            return steps
        steps.append(step)
        waiting = passed + waiting
