"""The objective as kernels: loads of a placement, its key, and which of two keys is better.

A key is ``[KEY]`` float64, compared from the front: tokens over the capacity (hard, so before everything), violation,
(split sequences, summed log2 size) of each length class from the shortest, communication, distinct groups, attention
imbalance, token imbalance (LiquidCP, section 4.2).
"""

from __future__ import annotations

import numpy as np

from buddyring.search.kernels.jit import kernel
from buddyring.search.tables import NUM_CLASSES

EXCESS, VIOLATION, PROFILE = 0, 1, 2
COMMUNICATION = PROFILE + 2 * NUM_CLASSES
DISTINCT, WORK_IMBALANCE, TOKEN_IMBALANCE = COMMUNICATION + 1, COMMUNICATION + 2, COMMUNICATION + 3
KEY = COMMUNICATION + 4
CLOSE = 1e-9  # relative; criteria closer than this are equal
ZERO = 1e-12  # a violation below this is rounding


@kernel
def compare(left, right, count):
    """Sign of left - right over the first ``count`` criteria: -1 when left is better, 0 when they are equal."""
    for k in range(count):
        a, b = left[k], right[k]
        if a != b and abs(a - b) > CLOSE * max(abs(a), abs(b)):
            return -1 if a < b else 1
    return 0


@kernel
def add(t, tokens, work, i, code, sign):
    """Add (sign 1) or take away (sign -1) sequence ``i`` on group ``code``. tokens, work: ``[ranks]``, changed."""
    size, start = 1 << t.level_of[code], t.start_of[code]
    for p in range(size):
        tokens[start + p] += sign * t.held[i, size - 1 + p]
        work[start + p] += sign * t.work[i, size - 1 + p]


@kernel
def balance(t, tokens, work):
    """Tokens over the capacity, violation, attention imbalance, token imbalance."""
    most_tokens, least_tokens, most_work, least_work = tokens[0], tokens[0], work[0], work[0]
    for r in range(1, len(tokens)):
        most_tokens, least_tokens = max(most_tokens, tokens[r]), min(least_tokens, tokens[r])
        most_work, least_work = max(most_work, work[r]), min(least_work, work[r])
    off_tokens = max(most_tokens * t.token_scale - 1.0, 1.0 - least_tokens * t.token_scale)
    off_work = max(most_work * t.work_scale - 1.0, 1.0 - least_work * t.work_scale)
    violation = max(off_tokens - t.token_tolerance, off_work - t.work_tolerance)
    return max(0.0, most_tokens - t.limit), violation if violation > ZERO else 0.0, off_work, off_tokens


@kernel
def split_cost(t, key, i, level, sign):
    """Count sequence ``i``, split to ``level``, into (sign 1) or out of (sign -1) a key's profile and communication."""
    if level > 0:
        key[PROFILE + 2 * t.classes[i]] += sign
        key[PROFILE + 2 * t.classes[i] + 1] += sign * level
        key[COMMUNICATION] += sign * t.lengths[i] * (1.0 - 1.0 / (1 << level))


@kernel
def evaluate(t, codes, tokens, work, users, key):
    """Fill the loads, the sequences on each group (``[codes]`` int64) and the key of a whole placement ``codes``."""
    tokens[:] = 0.0
    work[:] = 0.0
    users[:] = 0
    key[:] = 0.0
    for i in range(len(codes)):
        add(t, tokens, work, i, codes[i], 1.0)
        split_cost(t, key, i, t.level_of[codes[i]], 1.0)
        users[codes[i]] += 1
    key[EXCESS], key[VIOLATION], key[WORK_IMBALANCE], key[TOKEN_IMBALANCE] = balance(t, tokens, work)
    key[DISTINCT] = np.sum(users > 0)
