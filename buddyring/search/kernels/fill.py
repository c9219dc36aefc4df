"""Completing the placements of the beam: fillers one by one (LiquidCP, appendix A.1)."""

from __future__ import annotations

import numpy as np

from buddyring.search.kernels.jit import kernel
from buddyring.search.kernels.objective import KEY, ZERO, add, evaluate

SHARPNESS = 8.0  # of the smooth maximum
STEEPEST = 20.0  # means; loads beyond this are alike, so that products of exponentials stay finite


@kernel
def complete(t, heads):
    """Give every sequence that the beam left a rank of its own: ``[states, n]`` codes and ``[states, KEY]`` keys.

    heads: ``[states, count]`` codes of the first ``count`` sequences. Each of the others, longest first, goes to the
    rank that keeps the larger overload least, then ``smax(tokens) + smax(work)``, then to the lower rank.
    """
    states, count, n = heads.shape[0], heads.shape[1], len(t.lengths)
    codes = np.empty((states, n), dtype=np.int64)
    keys = np.empty((states, KEY))
    tokens, work = np.empty(t.ranks), np.empty(t.ranks)
    users = np.empty(t.offsets[t.levels], dtype=np.int64)
    for b in range(states):
        codes[b, :count] = heads[b]
        tokens[:] = 0.0
        work[:] = 0.0
        for i in range(count):
            add(t, tokens, work, i, heads[b, i], 1.0)
        fill(t, codes[b], count, tokens, work)
        evaluate(t, codes[b], tokens, work, users, keys[b])
    return codes, keys


@kernel
def steep(x):
    """``exp`` of a load in means, for the smooth maximum."""
    return np.exp(SHARPNESS * min(x, STEEPEST))


@kernel
def rank_overload(t, tokens, work):
    """Overload of a rank: beyond a tolerance or the capacity, relative to the mean load; not below 0."""
    over = max(tokens * t.token_scale - 1.0 - t.token_tolerance, (tokens - t.limit) * t.token_scale)
    return max(0.0, over, work * t.work_scale - 1.0 - t.work_tolerance)


@kernel
def fill(t, codes, first, tokens, work):
    """Place the sequences from ``first`` on, given the loads of those before; changes codes and loads."""
    token_steep, work_steep = np.empty(t.ranks), np.empty(t.ranks)
    worst = 0.0
    for r in range(t.ranks):
        token_steep[r], work_steep[r] = steep(tokens[r] * t.token_scale), steep(work[r] * t.work_scale)
        worst = max(worst, rank_overload(t, tokens[r], work[r]))
    token_sum, work_sum = np.sum(token_steep), np.sum(work_steep)
    for i in range(first, len(codes)):
        held, pairs = t.held[i, 0], t.work[i, 0]
        token_factor = np.exp(SHARPNESS * min(held * t.token_scale, STEEPEST)) - 1.0
        work_factor = np.exp(SHARPNESS * min(pairs * t.work_scale, STEEPEST)) - 1.0
        best, best_over, best_smooth = -1, np.inf, np.inf
        for r in range(t.ranks):
            over = max(worst, rank_overload(t, tokens[r] + held, work[r] + pairs))
            if over > best_over + ZERO:
                continue
            # smax is a logarithm over 8, so the least sum of two is the least product of the two inner sums
            smooth = (token_sum + token_steep[r] * token_factor) * (work_sum + work_steep[r] * work_factor)
            if over < best_over - ZERO or smooth < best_smooth:
                best, best_over, best_smooth = r, over, smooth
        codes[i] = best
        tokens[best] += held
        work[best] += pairs
        worst = best_over
        token_sum -= token_steep[best]
        work_sum -= work_steep[best]
        token_steep[best], work_steep[best] = steep(tokens[best] * t.token_scale), steep(work[best] * t.work_scale)
        token_sum += token_steep[best]
        work_sum += work_steep[best]


@kernel
def deal(t, sizes):
    """``[n]`` int64: the domain of each sequence. sizes: ``[domains]`` ranks of each.

    Longest first, to the domain whose larger load per rank, in means, is least afterwards; then to the first.
    """
    tokens, work = np.zeros(len(sizes)), np.zeros(len(sizes))
    domains = np.empty(len(t.lengths), dtype=np.int64)
    for i in range(len(domains)):
        best, best_load = 0, np.inf
        for d in range(len(sizes)):
            load = max((tokens[d] + t.held[i, 0]) * t.token_scale, (work[d] + t.work[i, 0]) * t.work_scale) / sizes[d]
            if load < best_load:
                best, best_load = d, load
        domains[i] = best
        tokens[best] += t.held[i, 0]
        work[best] += t.work[i, 0]
    return domains
