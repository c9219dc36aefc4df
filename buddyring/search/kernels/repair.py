"""Local repair of a whole placement (LiquidCP, appendix A.1)."""

from __future__ import annotations

import numpy as np

from buddyring.search.kernels.jit import kernel
from buddyring.search.kernels.objective import (
    DISTINCT,
    EXCESS,
    KEY,
    TOKEN_IMBALANCE,
    VIOLATION,
    WORK_IMBALANCE,
    add,
    balance,
    compare,
    evaluate,
    split_cost,
)
from buddyring.search.kernels.sort import ascending

EXTREMES = 2  # ranks looked at per load and end
CONSIDERED = 4  # sequences looked at per rank
NONE = np.int64(-1)  # of NumPy, so that Numba takes it for a number like any other


@kernel
def repair(t, codes, key, criteria, most_moves):
    """Improve ``codes`` and its ``key`` in place by the best single change, until there is none or ``most_moves``.

    criteria: how many of the key's criteria an improvement may be in.

    Changes: a whole sequence moves from a high-load rank to a low-load one, or two swap; a sequence on a high-load
    rank grows to the parent group, or moves to a group of its size or less that holds a low-load rank; two sequences
    of a group that holds a marked rank go one into each half. Beyond the paper, any split sequence may shrink into
    a smaller group with a low-load rank: that is what the splitting profile asks for once the loads are in tolerance.
    """
    tokens, work = np.empty(t.ranks), np.empty(t.ranks)
    users = np.empty(t.offsets[t.levels], dtype=np.int64)
    evaluate(t, codes, tokens, work, users, key)
    best, trial, chosen = np.empty(KEY), np.empty(KEY), np.empty(4, dtype=np.int64)
    token_row, work_row = np.empty(t.ranks), np.empty(t.ranks)
    on_rank = np.empty((4 * EXTREMES, CONSIDERED), dtype=np.int64)
    changes = np.empty((most_changes(len(codes), t.levels), 4), dtype=np.int64)
    for _ in range(most_moves):
        best[:] = key
        chosen[0] = NONE
        marked, n_high = mark(tokens, work)
        for m in range(len(marked)):
            hold(t, codes, marked[m], on_rank[m])
        low, count = marked[n_high:], 0
        for h in range(n_high):
            for a in on_rank[h]:
                if a != NONE:
                    count = move_to_low(t, codes, a, marked[h], low, on_rank[n_high:], changes, count)
                    count = grow(t, codes, a, changes, count)
        for m in range(len(marked)):
            count = push_apart(t, codes, users, marked[m], changes, count)
        count = shrink(t, codes, low, changes, count)
        state = (codes, tokens, work, users, key, token_row, work_row)
        for c in range(count):
            if judge(t, state, changes[c], trial, best, criteria):
                best[:] = trial
                chosen[:] = changes[c]
        if chosen[0] == NONE:
            break
        for k in range(0, 4, 2):
            i, code = chosen[k], chosen[k + 1]
            if i != NONE:
                users[codes[i]] -= 1
                users[code] += 1
                add(t, tokens, work, i, codes[i], -1.0)
                add(t, tokens, work, i, code, 1.0)
                codes[i] = code
        key[:] = best


@kernel
def most_changes(n, levels):
    """Room for the changes of one round, each a row (sequence, code, sequence or NONE, code)."""
    by_high_rank = CONSIDERED * (2 * EXTREMES * (levels + CONSIDERED) + 1)
    by_marked_rank = levels * CONSIDERED * CONSIDERED
    return 2 * EXTREMES * by_high_rank + 4 * EXTREMES * by_marked_rank + n * levels * 2 * EXTREMES


@kernel
def mark(tokens, work):
    """The most loaded ranks per load, then the least loaded ones; and how many the first are."""
    by_tokens, by_work = ascending(tokens), ascending(work)
    marked = np.empty(4 * EXTREMES, dtype=np.int64)
    count = n_high = 0
    for end in range(2):
        first = count
        for k in range(min(EXTREMES, len(tokens))):
            position = k if end == 1 else len(tokens) - 1 - k
            for r in (by_tokens[position], by_work[position]):
                seen = False
                for other in range(first, count):
                    seen = seen or marked[other] == r
                if not seen:
                    marked[count] = r
                    count += 1
        if end == 0:
            n_high = count
    return marked[:count], n_high


@kernel
def hold(t, codes, rank, found):
    """Fill ``found`` with the longest sequences on ``rank``, then NONE."""
    count = 0
    found[:] = NONE
    for i in range(len(codes)):
        start = t.start_of[codes[i]]
        if start <= rank < start + (1 << t.level_of[codes[i]]):
            found[count] = i
            count += 1
            if count == len(found):
                break


@kernel
def put(changes, count, i, code_i, j, code_j):
    """Write change ``count``: ``i`` to ``code_i`` and, unless it is NONE, ``j`` to ``code_j``. The new count."""
    changes[count, 0], changes[count, 1], changes[count, 2], changes[count, 3] = i, code_i, j, code_j
    return count + 1


@kernel
def judge(t, state, change, trial, best, criteria):
    """Whether a change makes a key, left in ``trial``, better than ``best``. Everything else stays as it is."""
    codes, tokens, work, users, key, token_row, work_row = state
    i, code_i, j, code_j = change[0], change[1], change[2], change[3]
    trial[:DISTINCT] = key[:DISTINCT]
    recost(t, trial, i, codes[i], code_i)
    if j != NONE:
        recost(t, trial, j, codes[j], code_j)
    if best[EXCESS] == 0.0 and best[VIOLATION] == 0.0:  # then most changes are out before their loads are known
        trial[EXCESS] = trial[VIOLATION] = 0.0
        sign = compare(trial, best, DISTINCT)
        if sign > 0 or (sign == 0 and criteria <= DISTINCT):
            return False
    token_row[:] = tokens
    work_row[:] = work
    add(t, token_row, work_row, i, codes[i], -1.0)
    add(t, token_row, work_row, i, code_i, 1.0)
    if j != NONE:
        add(t, token_row, work_row, j, codes[j], -1.0)
        add(t, token_row, work_row, j, code_j, 1.0)
    trial[EXCESS], trial[VIOLATION], trial[WORK_IMBALANCE], trial[TOKEN_IMBALANCE] = balance(t, token_row, work_row)
    if compare(trial, best, min(criteria, DISTINCT)) > 0:
        return False
    users[codes[i]] -= 1
    users[code_i] += 1
    if j != NONE:
        users[codes[j]] -= 1
        users[code_j] += 1
    trial[DISTINCT] = np.sum(users > 0)
    users[codes[i]] += 1
    users[code_i] -= 1
    if j != NONE:
        users[codes[j]] += 1
        users[code_j] -= 1
    return compare(trial, best, criteria) < 0


@kernel
def recost(t, key, i, before, after):
    """Bring the profile and communication of ``key`` up to date with one move."""
    split_cost(t, key, i, t.level_of[before], -1.0)
    split_cost(t, key, i, t.level_of[after], 1.0)


@kernel
def move_to_low(t, codes, a, high, low, on_low, changes, count):
    """Sequence ``a``, on rank ``high``: to the low-load ranks, in exchange for a sequence of theirs or without."""
    level_a = t.level_of[codes[a]]
    for m in range(len(low)):
        for level in range(level_a + 1):
            code = t.offsets[level] + (low[m] >> level)
            if code != codes[a]:
                count = put(changes, count, a, code, NONE, NONE)
        if level_a == 0 and low[m] != high:
            for b in on_low[m]:
                if b != NONE and t.level_of[codes[b]] == 0:
                    count = put(changes, count, a, codes[b], b, codes[a])
    return count


@kernel
def grow(t, codes, a, changes, count):
    """Sequence ``a`` to the group that its own is half of."""
    code = codes[a]
    level = t.level_of[code] + 1
    if level < t.levels and t.legal[a, level]:
        count = put(changes, count, a, t.offsets[level] + (t.start_of[code] >> level), NONE, NONE)
    return count


@kernel
def push_apart(t, codes, users, rank, changes, count):
    """Of each group that holds ``rank``: any two of its longest sequences, one into each half."""
    members = np.empty(CONSIDERED, dtype=np.int64)
    for level in range(1, t.levels):
        code = t.offsets[level] + (rank >> level)
        if users[code] < 2:
            continue
        found = 0
        for i in range(len(codes)):
            if codes[i] == code:
                members[found] = i
                found += 1
                if found == CONSIDERED:
                    break
        left = t.offsets[level - 1] + (t.start_of[code] >> (level - 1))
        for a in range(found):
            for b in range(found):
                if a != b:
                    count = put(changes, count, members[a], left, members[b], left + 1)
    return count


@kernel
def shrink(t, codes, low, changes, count):
    """Every split sequence: to the smaller groups that hold a low-load rank."""
    for i in range(len(codes)):
        for level in range(t.level_of[codes[i]]):
            for r in low:
                count = put(changes, count, i, t.offsets[level] + (r >> level), NONE, NONE)
    return count
