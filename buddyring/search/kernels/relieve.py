"""Relief of the rank that is furthest out of tolerance, by whole sequences alone.

Local repair counts the furthest rank only. Where a long sequence has taken a whole group out of tolerance, no single
change helps all of its ranks, and repair stops. Here every rank counts, by the square of its own violation, so the
ranks of such a group are relieved one after the other.
"""

from __future__ import annotations

import numpy as np

from buddyring.search.kernels.jit import kernel
from buddyring.search.kernels.objective import ZERO, add

NONE = np.int64(-1)  # of NumPy, so that Numba takes it for a number like any other


@kernel
def relieve(t, codes, most_tried):
    """Improve ``codes`` in place until no change relieves the furthest rank, or ``most_tried`` changes were looked at.

    A change moves a whole sequence onto that rank or off it or, if no move helps, swaps one of its whole sequences with
    one elsewhere; the best by the sum of squares is made. No rank is filled beyond the capacity.
    """
    tokens, work = np.zeros(t.ranks), np.zeros(t.ranks)
    for i in range(len(codes)):
        add(t, tokens, work, i, codes[i], 1.0)
    strains = np.empty(t.ranks)
    for r in range(t.ranks):
        strains[r] = strain(t, tokens[r], work[r])
    tried = 0
    while tried < most_tried:
        worst = np.argmax(strains)
        if strains[worst] == 0.0:
            break
        a, to, b, looked = best_move(t, codes, tokens, work, strains, worst)
        tried += looked
        if a == NONE:
            a, to, b, looked = best_swap(t, codes, tokens, work, strains, worst)
            tried += looked
            if a == NONE:
                break
        left = codes[a]
        shift(t, codes, tokens, work, a, to)
        if b != NONE:
            shift(t, codes, tokens, work, b, left)
        for r in (left, to):
            strains[r] = strain(t, tokens[r], work[r])


@kernel
def strain(t, tokens, work):
    """Square of the violation of a rank with these loads; infinite beyond the capacity."""
    if tokens > t.limit:
        return np.inf
    off_tokens = abs(tokens * t.token_scale - 1.0) - t.token_tolerance
    off_work = abs(work * t.work_scale - 1.0) - t.work_tolerance
    return max(0.0, off_tokens, off_work) ** 2


@kernel
def relief(t, tokens, work, strains, a, b, held, pairs):
    """By how much the strain of ranks ``a`` and ``b`` falls when ``held`` tokens and ``pairs`` go from a to b."""
    after = strain(t, tokens[a] - held, work[a] - pairs) + strain(t, tokens[b] + held, work[b] + pairs)
    return strains[a] + strains[b] - after


@kernel
def shift(t, codes, tokens, work, i, code):
    """Move sequence ``i`` to the group ``code``."""
    add(t, tokens, work, i, codes[i], -1.0)
    add(t, tokens, work, i, code, 1.0)
    codes[i] = code


@kernel
def best_move(t, codes, tokens, work, strains, worst):
    """(sequence, rank, NONE, changes looked at) of the best move onto rank ``worst`` or off it; NONE without any."""
    best, a, to, looked = ZERO, NONE, NONE, 0
    for i in range(len(codes)):
        if t.level_of[codes[i]] > 0:
            continue
        rank, held, pairs = codes[i], t.held[i, 0], t.work[i, 0]  # whole sequences have their rank for a code
        first, last = (0, t.ranks) if rank == worst else (worst, worst + 1)
        looked += last - first
        for other in range(first, last):
            if other == rank:
                continue
            gain = relief(t, tokens, work, strains, rank, other, held, pairs)
            if gain > best:
                best, a, to = gain, np.int64(i), np.int64(other)
    return a, to, NONE, looked


@kernel
def best_swap(t, codes, tokens, work, strains, worst):
    """(sequence, rank, sequence there, changes looked at) of the best swap with rank ``worst``; NONE without any."""
    best, a, to, b, looked = ZERO, NONE, NONE, NONE, 0
    for i in range(len(codes)):
        if codes[i] != worst:
            continue
        for j in range(len(codes)):
            rank = codes[j]
            if t.level_of[rank] > 0 or rank == worst:
                continue
            held, pairs = t.held[i, 0] - t.held[j, 0], t.work[i, 0] - t.work[j, 0]
            gain = relief(t, tokens, work, strains, worst, rank, held, pairs)
            if gain > best:
                best, a, to, b = gain, np.int64(i), np.int64(rank), np.int64(j)
        looked += len(codes)
    return a, to, b, looked
