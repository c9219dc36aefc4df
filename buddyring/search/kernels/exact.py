"""Small steps decided exactly: branch and bound over every legal placement."""

from __future__ import annotations

import numpy as np

from buddyring.search.kernels.jit import kernel
from buddyring.search.kernels.objective import (
    COMMUNICATION,
    DISTINCT,
    EXCESS,
    KEY,
    TOKEN_IMBALANCE,
    VIOLATION,
    WORK_IMBALANCE,
    ZERO,
    add,
    balance,
    compare,
    split_cost,
)


@kernel
def decide(t, best_codes, best_key, budget):
    """Improve a placement to the optimum in place; whether it was proved, within ``budget`` nodes.

    A node is a placement of the longest sequences. It is left when what only grows as sequences are added (tokens over
    the capacity and overload as they stand, splitting profile, communication) is already worse than the best whole
    placement's. Of sequences with one length the first never takes the later group, and where every place of a group
    holds the same loads, a group is skipped whose left sibling is still as empty as itself.
    """
    n = len(t.lengths)
    tokens, work = np.zeros((n + 1, t.ranks)), np.zeros((n + 1, t.ranks))
    keys = np.zeros((n + 1, KEY))
    codes = np.full(n, -1, dtype=np.int64)
    users = np.zeros(t.offsets[t.levels], dtype=np.int64)
    i = 0
    while i >= 0:
        if codes[i] >= 0:
            users[codes[i]] -= 1
            code = codes[i] + 1
        else:
            code = codes[i - 1] if i > 0 and t.lengths[i] == t.lengths[i - 1] else 0
        last = t.offsets[t.levels]
        while code < last and (not t.legal[i, t.level_of[code]] or (t.even and is_mirrored(t, tokens[i], code))):
            code += 1
        if code == last:
            codes[i] = -1
            i -= 1
            continue
        if budget == 0:
            return False
        budget -= 1
        codes[i] = code
        users[code] += 1
        tokens[i + 1], work[i + 1], keys[i + 1] = tokens[i], work[i], keys[i]
        add(t, tokens[i + 1], work[i + 1], i, code, 1.0)
        split_cost(t, keys[i + 1], i, t.level_of[code], 1.0)
        key = keys[i + 1]
        if i < n - 1:
            key[EXCESS], key[VIOLATION] = floor(t, tokens[i + 1], work[i + 1])
            if compare(key, best_key, COMMUNICATION + 1) <= 0:
                i += 1
            continue
        key[EXCESS], key[VIOLATION], key[WORK_IMBALANCE], key[TOKEN_IMBALANCE] = balance(t, tokens[n], work[n])
        key[DISTINCT] = np.sum(users > 0)
        if compare(key, best_key, KEY) < 0:
            best_key[:] = key
            best_codes[:] = codes
    return True


@kernel
def floor(t, tokens, work):
    """Least tokens over the capacity and least violation that any completion of these loads can have."""
    most_tokens, most_work = np.max(tokens), np.max(work)
    over = max(most_tokens * t.token_scale - 1.0 - t.token_tolerance, most_work * t.work_scale - 1.0 - t.work_tolerance)
    return max(0.0, most_tokens - t.limit), over if over > ZERO else 0.0


@kernel
def is_mirrored(t, tokens, code):
    """Whether a group, or one that holds it, is the right one of two siblings (or trees) that are both empty."""
    for level in range(t.level_of[code], t.levels):
        size = 1 << level
        start = t.start_of[code] >> level << level
        if level < t.levels - 1 and start & size == 0 or start == 0:
            continue
        if np.max(tokens[start - size : start + size]) == 0.0:
            return True
    return False
