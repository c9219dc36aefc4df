"""Pareto beam over the structural sequences (LiquidCP, appendix A.1)."""

from __future__ import annotations

import numpy as np

from buddyring.search.kernels.jit import kernel
from buddyring.search.kernels.objective import CLOSE, add
from buddyring.search.kernels.sort import ascending

BIN = 0.02  # of the mean load: states that differ by less on every rank are one
CODE, COMMUNICATION, DISTINCT, TOKEN_SPREAD, WORK_SPREAD, OVERLOAD, CRITERIA = 0, 1, 2, 3, 4, 5, 6
# Bits of (count, summed log2 size - count) per length class in a profile packed into 62 bits, shortest class first.
# Counts that do not fit saturate; this only orders states of the beam, placements are compared by their exact key.
PROFILE_SHIFTS = np.array([57, 52, 47, 42, 36, 30, 23, 16, 8, 0], dtype=np.int64)
PROFILE_CAPS = np.array([31, 31, 31, 31, 63, 63, 127, 127, 255, 255], dtype=np.int64)


@kernel
def beam(t, allowed, count, width, per_level):
    """Place the first ``count`` sequences; answer ``[states, count]`` group codes, at most ``width`` states.

    allowed: ``[n, levels]`` bool, sizes that each sequence may take. per_level: groups tried per size from each state,
    the least loaded ones.
    """
    levels, n_codes, ranks = t.levels, t.offsets[t.levels], t.ranks
    room = width * sum_tried(t, per_level)
    codes, next_codes = np.empty((width, count), dtype=np.int64), np.empty((width, count), dtype=np.int64)
    loads, next_loads = np.zeros((width, 2, ranks)), np.zeros((width, 2, ranks))
    used, next_used = np.zeros((width, n_codes), dtype=np.int64), np.zeros((width, n_codes), dtype=np.int64)
    profile, next_profile = np.zeros((width, 10), dtype=np.int64), np.zeros((width, 10), dtype=np.int64)
    communication, next_communication = np.zeros(width), np.zeros(width)
    parent, chosen = np.empty(room, dtype=np.int64), np.empty(room, dtype=np.int64)
    criteria, digest = np.empty((room, CRITERIA)), np.empty(room, dtype=np.uint64)
    token_row, work_row, nodes = np.empty(ranks), np.empty(ranks), np.empty(ranks, dtype=np.uint64)
    slots = np.empty(table_size(room), dtype=np.int64)
    states = 1
    for i in range(count):
        found = 0
        for b in range(states):
            distinct = np.sum(used[b])
            for level in range(levels):
                if not allowed[i, level]:
                    continue
                split = pack_profile(profile[b], t.classes[i], level)
                moved = communication[b] + t.lengths[i] * (1.0 - 1.0 / (1 << level))
                for code in groups_to_try(t, loads[b], i, level, per_level):
                    token_row[:] = loads[b, 0]
                    work_row[:] = loads[b, 1]
                    add(t, token_row, work_row, i, code, 1.0)
                    parent[found], chosen[found] = b, code
                    criteria[found, CODE], criteria[found, COMMUNICATION] = split, moved
                    criteria[found, DISTINCT] = distinct + 1 - used[b, code]
                    measure(t, token_row, work_row, criteria[found])
                    digest[found] = tree_digest(t, token_row, work_row, nodes)
                    found += 1
        kept = undominated(criteria, merge(criteria, digest, found, slots))
        if len(kept) > width:
            kept = crowd(criteria, kept, width)
        states = len(kept)
        for k in range(states):
            b, code = parent[kept[k]], chosen[kept[k]]
            next_codes[k, :i] = codes[b, :i]
            next_codes[k, i] = code
            next_loads[k] = loads[b]
            add(t, next_loads[k, 0], next_loads[k, 1], i, code, 1.0)
            next_used[k] = used[b]
            next_used[k, code] = 1
            next_profile[k] = profile[b]
            if t.level_of[code] > 0:
                next_profile[k, 2 * t.classes[i]] += 1
                next_profile[k, 2 * t.classes[i] + 1] += t.level_of[code] - 1
            next_communication[k] = criteria[kept[k], COMMUNICATION]
        codes, next_codes = next_codes, codes
        loads, next_loads = next_loads, loads
        used, next_used = next_used, used
        profile, next_profile = next_profile, profile
        communication, next_communication = next_communication, communication
    return codes[:states]


@kernel
def sum_tried(t, per_level):
    """Most groups tried from one state."""
    total = 0
    for level in range(t.levels):
        total += min(t.ranks >> level, per_level)
    return total


@kernel
def groups_to_try(t, loads, i, level, per_level):
    """Codes of one size, without those whose ranks hold just what their left sibling's hold: they are the same."""
    size, first, tokens, work = 1 << level, t.offsets[level], loads[0], loads[1]
    found = np.empty(t.ranks >> level, dtype=np.int64)
    count = 0
    for g in range(t.ranks >> level):
        start, same = g * size, g > 0 and (level == t.levels - 1 or g % 2 == 1)
        if same:
            for r in range(start, start + size):
                if tokens[r] != tokens[r - size] or work[r] != work[r - size]:
                    same = False
                    break
        if not same:
            found[count] = first + g
            count += 1
    if count <= per_level:
        return found[:count]
    load = np.empty(count)
    for k in range(count):
        start, load[k] = t.start_of[found[k]], 0.0
        for p in range(size):
            after = max(
                (tokens[start + p] + t.held[i, size - 1 + p]) * t.token_scale,
                (work[start + p] + t.work[i, size - 1 + p]) * t.work_scale,
            )
            load[k] = max(load[k], after)
    order = ascending(load)
    tried = np.empty(per_level, dtype=np.int64)
    for k in range(per_level):
        tried[k] = found[order[k]]
    return tried


@kernel
def pack_profile(profile, klass, level):
    """The splitting profile after one more sequence of ``klass`` at ``level``, as one number."""
    packed = np.int64(0)
    for k in range(10):
        value = profile[k]
        if level > 0 and k == 2 * klass:
            value += 1
        elif level > 0 and k == 2 * klass + 1:
            value += level - 1
        packed += min(value, PROFILE_CAPS[k]) << PROFILE_SHIFTS[k]
    return packed


@kernel
def measure(t, tokens, work, row):
    """Fill the spreads and the larger overload (a load over the capacity counts as overload)."""
    most_tokens, least_tokens, most_work, least_work = tokens[0], tokens[0], work[0], work[0]
    for r in range(1, len(tokens)):
        most_tokens, least_tokens = max(most_tokens, tokens[r]), min(least_tokens, tokens[r])
        most_work, least_work = max(most_work, work[r]), min(least_work, work[r])
    row[TOKEN_SPREAD] = (most_tokens - least_tokens) * t.token_scale
    row[WORK_SPREAD] = (most_work - least_work) * t.work_scale
    over = max(most_tokens * t.token_scale - 1.0 - t.token_tolerance, (most_tokens - t.limit) * t.token_scale)
    row[OVERLOAD] = max(0.0, over, most_work * t.work_scale - 1.0 - t.work_tolerance)


@kernel
def mix(x):
    """A 64-bit number scattered (the finaliser of splitmix64)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@kernel
def tree_digest(t, tokens, work, nodes):
    """One number for the binned loads, the same whichever way the halves of any group are exchanged.

    Exchanging halves changes nothing that the objective sees, so such states are one too.
    """
    for r in range(t.ranks):
        token_bin = np.uint64(tokens[r] * t.token_scale / BIN)
        nodes[r] = mix((token_bin << np.uint64(32)) + np.uint64(work[r] * t.work_scale / BIN) + np.uint64(1))
    count = t.ranks
    for _ in range(1, t.levels):
        count //= 2
        for k in range(count):
            nodes[k] = mix(nodes[2 * k] + nodes[2 * k + 1])
    total = np.uint64(0)
    for k in range(count):
        total += nodes[k]
    return total


@kernel
def table_size(room):
    """Slots of a hash table for ``room`` entries: a power of two, at most half full."""
    size = 2
    while size < 2 * room:
        size *= 2
    return size


@kernel
def merge(criteria, digest, count, slots):
    """Of the candidates with one digest keep the best by profile, communication, distinct groups; then the first."""
    slots[:] = -1
    kept = np.empty(count, dtype=np.int64)
    found = 0
    for c in range(count):
        slot = np.int64(digest[c] & np.uint64(len(slots) - 1))
        while slots[slot] >= 0 and digest[kept[slots[slot]]] != digest[c]:
            slot = (slot + 1) & (len(slots) - 1)
        if slots[slot] < 0:
            slots[slot] = found
            kept[found] = c
            found += 1
            continue
        best = kept[slots[slot]]
        for k in range(DISTINCT + 1):
            if criteria[c, k] != criteria[best, k]:
                if criteria[c, k] < criteria[best, k]:
                    kept[slots[slot]] = c
                break
    return kept[:found]


@kernel
def undominated(criteria, kept):
    """Without the candidates that another one beats or equals in every criterion and beats in one."""
    order = ascending(column(criteria, kept, CODE))
    alive = np.empty(len(kept), dtype=np.int64)
    found = 0
    for a in range(len(order)):
        # only candidates with a profile as good can dominate, so those are looked at in order of profile
        candidate, lost, b = kept[order[a]], False, 0
        while not lost and b < len(order) and criteria[kept[order[b]], CODE] <= criteria[candidate, CODE]:
            lost = dominates(criteria, kept[order[b]], candidate)
            b += 1
        if not lost:
            alive[found] = candidate
            found += 1
    return alive[:found]


@kernel
def column(criteria, kept, k):
    """``[kept]``: criterion ``k`` of the kept candidates."""
    values = np.empty(len(kept))
    for position in range(len(kept)):
        values[position] = criteria[kept[position], k]
    return values


@kernel
def dominates(criteria, a, b):
    """Whether candidate ``a`` is nowhere worse than ``b`` and somewhere better."""
    better = False
    for k in range(CRITERIA):
        if criteria[a, k] > criteria[b, k]:
            return False
        if criteria[a, k] < criteria[b, k]:
            better = True
    return better


@kernel
def crowd(criteria, kept, width):
    """The best in each criterion, then by decreasing crowding distance (NSGA-II) until there are ``width``."""
    count = len(kept)
    chosen = np.zeros(count, dtype=np.bool_)
    remoteness = np.zeros(count)  # crowding distance, negative for an ascending sort
    result = np.empty(width, dtype=np.int64)
    taken = 0
    for k in range(CRITERIA):
        values = column(criteria, kept, k)
        order = ascending(values)
        if k == CODE:
            to_ranks(values, order)  # packed numbers have no distances
        if taken < width and not chosen[order[0]]:
            chosen[order[0]] = True
            result[taken] = kept[order[0]]
            taken += 1
        remoteness[order[0]] = remoteness[order[-1]] = -np.inf
        span = values[order[-1]] - values[order[0]]
        if span > CLOSE:
            for position in range(1, count - 1):
                remoteness[order[position]] -= (values[order[position + 1]] - values[order[position - 1]]) / span
    for c in ascending(remoteness):
        if taken == width:
            break
        if not chosen[c]:
            result[taken] = kept[c]
            taken += 1
    return result


@kernel
def to_ranks(values, order):
    """Replace ``values`` by their places in ``order``, equal ones sharing one."""
    rank, last = 0.0, values[order[0]]
    for position in range(len(order)):
        if values[order[position]] != last:
            rank, last = rank + 1.0, values[order[position]]
        values[order[position]] = rank
