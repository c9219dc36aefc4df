"""Branch and bound over every legal placement: exact for small steps, a deeper search for larger ones."""

from __future__ import annotations

import numpy as np

from buddyring.search.kernels.fill import fill
from buddyring.search.kernels.jit import kernel
from buddyring.search.kernels.objective import (
    CLOSE,
    COMMUNICATION,
    DISTINCT,
    EXCESS,
    KEY,
    PROFILE,
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
def decide(t, best_codes, best_key, count, skip_mirrors, budget):
    """Improve a placement to the optimum in place, by at most ``budget`` nodes; the nodes left, 0 if not proved.

    A node places one more sequence, longest first. It is left when what every completion must have (``bound``) is
    already worse than the best whole placement. Of sequences with one length the first never takes the later group.
    skip_mirrors: do not try a group whose left sibling (or tree) is still as empty as its own. That loses nothing where
    all places of a group hold the same loads; elsewhere it may cost the last digits of an imbalance.
    """
    n, last = len(t.lengths), t.offsets[t.levels]
    tokens, work = np.zeros((count + 1, t.ranks)), np.zeros((count + 1, t.ranks))
    keys, rest, lower = np.zeros((count + 1, KEY)), np.zeros((count + 1, KEY)), np.zeros(KEY)
    left_tokens, left_work = np.zeros(n + 1), np.zeros(n + 1)
    for i in range(n - 1, -1, -1):
        left_tokens[i] = left_tokens[i + 1] + t.held[i, 0]
        left_work[i] = left_work[i + 1] + t.work[i, 0]
    least_splits(t, best_key, rest)
    codes = np.full(n, -1, dtype=np.int64)
    users = np.zeros(last, dtype=np.int64)
    i = 0
    while i >= 0:
        if codes[i] >= 0:
            users[codes[i]] -= 1
            code = codes[i] + 1
        else:
            code = codes[i - 1] if i > 0 and t.lengths[i] == t.lengths[i - 1] else np.int64(0)
        while code < last and (
            not t.legal[i, t.level_of[code]] or (skip_mirrors and is_mirrored(t, tokens[i], work[i], code))
        ):
            code += 1
        if code == last:
            codes[i] = -1
            i -= 1
            continue
        if budget <= 0:
            return 0
        budget -= 1
        codes[i] = code
        users[code] += 1
        tokens[i + 1], work[i + 1], keys[i + 1] = tokens[i], work[i], keys[i]
        add(t, tokens[i + 1], work[i + 1], i, code, 1.0)
        split_cost(t, keys[i + 1], i, t.level_of[code], 1.0)
        bound(t, tokens[i + 1], work[i + 1], left_tokens[i + 1], left_work[i + 1], lower)
        for k in range(PROFILE, COMMUNICATION + 1):
            lower[k] = keys[i + 1, k] + rest[i + 1, k]
        if compare(lower, best_key, COMMUNICATION + 1) > 0:
            continue
        if i < count - 1:
            i += 1
            continue
        key = keys[count]
        if count < n:
            fill(t, codes, count, tokens[count], work[count])
            budget -= (n - count) // 2
        key[EXCESS], key[VIOLATION], key[WORK_IMBALANCE], key[TOKEN_IMBALANCE] = balance(t, tokens[count], work[count])
        if compare(key, best_key, COMMUNICATION + 1) > 0:
            continue
        for k in range(count, n):
            users[codes[k]] += 1
        key[DISTINCT] = np.sum(users > 0)
        for k in range(count, n):
            users[codes[k]] -= 1
        if compare(key, best_key, KEY) < 0:
            tighter = key[VIOLATION] < best_key[VIOLATION]
            best_key[:] = key
            best_codes[:] = codes
            if tighter:
                least_splits(t, best_key, rest)
    return budget


@kernel
def least_splits(t, best_key, rest):
    """Fill ``rest[i]`` with the profile and communication that sequences ``i`` and later need at least.

    A placement that is not worse than the best in violation splits each sequence until its places fit a rank.
    """
    slack = best_key[VIOLATION] + CLOSE
    for i in range(len(rest) - 2, -1, -1):
        rest[i] = rest[i + 1]
        for level in range(t.levels):
            first = (1 << level) - 1
            if not t.legal[i, level]:
                continue
            tokens, work = t.held[i, first], t.work[i, first]
            for p in range(1, 1 << level):
                tokens, work = max(tokens, t.held[i, first + p]), max(work, t.work[i, first + p])
            fits = tokens * t.token_scale - 1.0 - t.token_tolerance <= slack
            if fits and work * t.work_scale - 1.0 - t.work_tolerance <= slack:
                split_cost(t, rest[i], i, level, 1.0)
                break


@kernel
def bound(t, tokens, work, left_tokens, left_work, lower):
    """Least tokens over the capacity and least violation that any completion of these loads can have.

    No load shrinks; and what is left must fill every rank up to the lower tolerance.
    """
    most_tokens, most_work, missing_tokens, missing_work = 0.0, 0.0, 0.0, 0.0
    for r in range(t.ranks):
        most_tokens, most_work = max(most_tokens, tokens[r]), max(most_work, work[r])
        missing_tokens += max(0.0, 1.0 - t.token_tolerance - tokens[r] * t.token_scale)
        missing_work += max(0.0, 1.0 - t.work_tolerance - work[r] * t.work_scale)
    over = max(most_tokens * t.token_scale - 1.0 - t.token_tolerance, most_work * t.work_scale - 1.0 - t.work_tolerance)
    under = max(missing_tokens - left_tokens * t.token_scale, missing_work - left_work * t.work_scale) / t.ranks
    violation = max(over, under)
    lower[EXCESS] = max(0.0, most_tokens - t.limit)
    lower[VIOLATION] = violation if violation > ZERO else 0.0


@kernel
def is_mirrored(t, tokens, work, code):
    """Whether a group, or one that holds it, is the right one of two siblings (or trees) that are both empty."""
    for level in range(t.level_of[code], t.levels):
        size = 1 << level
        start = t.start_of[code] >> level << level
        if start == 0 or (level < t.levels - 1 and start & size == 0):
            continue
        empty = True
        for r in range(start - size, start + size):
            empty = empty and tokens[r] == 0.0
        if empty:
            return True
    return False
