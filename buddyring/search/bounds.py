"""What no placement is below: lower bounds of the violation, each from an argument of a few lines."""

from __future__ import annotations

import numpy as np

from buddyring.search.tables import Tables

HALVINGS = 40  # of an interval; leaves 1e-12 of it


def least_violation(t: Tables) -> float:
    """The largest of the lower bounds here; 0 when none of them forces a violation."""
    blocks = t.ranks >> (t.levels - 1)
    bound = share_bound(t)
    for loads, scale, tolerance in (
        (t.held[:, 0], t.token_scale, t.token_tolerance),
        (t.work[:, 0], t.work_scale, t.work_tolerance),
    ):
        bound = max(bound, block_bound(loads * scale * blocks / t.ranks, blocks, tolerance))
    return max(bound, filling_bound(t)) * (1 + 1e-9)


def share_bound(t: Tables) -> float:
    """Some rank holds the largest share of the longest sequence, if nothing else."""
    least = np.full(len(t.lengths), np.inf)
    for level in range(t.levels):
        places = slice((1 << level) - 1, (2 << level) - 1)
        over = np.maximum(
            t.held[:, places].max(axis=1) * t.token_scale - 1 - t.token_tolerance,
            t.work[:, places].max(axis=1) * t.work_scale - 1 - t.work_tolerance,
        )
        least = np.minimum(least, np.where(t.legal[:, level], over, np.inf))
    return max(0.0, float(least.max()))


def block_bound(loads: np.ndarray, blocks: int, tolerance: float) -> float:
    """From whole sequences in blocks: groups are aligned, so each lies in one block, a place of the largest group.

    loads: ``[n]``, descending, whole load of each sequence over that of a mean block. A block's mean rank is no
    further from the mean than its furthest. Of the ``k`` heaviest sequences

    - one block holds at most ``k // blocks``; with the heaviest of them and all the others it is still that light;
    - one block holds more than ``(k - 1) // blocks``; with the lightest of the ``k`` it is already that heavy.

    And some block has at most, some at least, the mean of the blocks (which is 1 unless these are a part of all ranks).
    """
    total = np.concatenate([[0.0], np.cumsum(loads)])
    mean = total[-1] / blocks
    bound = max(mean - 1.0, 1.0 - mean) - tolerance
    k = np.arange(1, len(loads) + 1)
    lightest = (total[k // blocks] + total[-1] - total[k]).min()
    crowd = (k - 1) // blocks + 1
    heaviest = (total[k] - total[k - crowd]).max()
    return max(0.0, bound, 1.0 - lightest - tolerance, heaviest - 1.0 - tolerance)


def filling_bound(t: Tables) -> float:
    """The block of the longest sequence needs tokens for little work: at best the shortest sequences, and part of one.

    Violation ``v`` leaves its ranks work up to ``1 + work_tolerance + v`` of the mean and wants tokens down to
    ``1 - token_tolerance - v``; the bound is the least ``v`` for which the shortest sequences that fit are enough.
    """
    size = 1 << (t.levels - 1)
    tokens = np.concatenate([[0.0], np.cumsum(t.held[:0:-1, 0])]) * t.token_scale / size
    work = np.concatenate([[0.0], np.cumsum(t.work[:0:-1, 0])]) * t.work_scale / size
    own_tokens, own_work = t.held[0, 0] * t.token_scale / size, t.work[0, 0] * t.work_scale / size

    def enough(violation: float) -> bool:
        room = 1 + t.work_tolerance + violation - own_work
        wanted = 1 - t.token_tolerance - violation - own_tokens
        return room >= 0 and float(np.interp(room, work, tokens)) >= wanted

    if enough(0.0):
        return 0.0
    low, high = 0.0, max(1.0, own_work)  # the room is then enough for the sequence itself, and no tokens are wanted
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return low
