"""The best placement of a small step by trying every one. Shares no code with the planner it judges.

The objective and its order: LiquidCP, section 4.2 (violation, splitting profile, communication, distinct groups,
attention imbalance, token imbalance). Loads are counted token by token from an explicit zigzag deal.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np

CUTS = (2048, 4096, 8192, 16384)
CLOSE = 1e-9  # relative; float criteria closer than this are equal


@dataclass(frozen=True)
class Best:
    """The optimum of a step: its groups, its objective, and how many legal placements there were."""

    groups: tuple[tuple[int, int], ...]
    objective: tuple[float, ...]
    placements: int


@functools.lru_cache(maxsize=4096)
def deal(length: int, size: int, tile: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and query-key pairs of every place of a group of ``size`` that shares one sequence."""
    tiles = -(-length // tile)
    edges = np.minimum(np.arange(tiles + 1) * tile, length)
    tokens, pairs = np.zeros(size, dtype=np.int64), np.zeros(size, dtype=np.int64)
    if size == 1:
        chunks = [np.arange(tiles)]
        places = [0]
    else:
        chunks = np.array_split(np.arange(tiles), 2 * size)
        places = [min(chunk, 2 * size - 1 - chunk) for chunk in range(2 * size)]
    for place, chunk in zip(places, chunks, strict=True):
        positions = np.arange(edges[chunk[0]], edges[chunk[-1] + 1], dtype=np.int64)
        tokens[place] += len(positions)
        pairs[place] += int((positions + 1).sum())
    return tokens, pairs


def legal_groups(length: int, ranks: int, *, tile: int = 128, exact_tiles: bool = False, max_group: int = 8):
    """Every aligned group that may hold a sequence of ``length`` tokens, as (start, size)."""
    groups = []
    size = 1
    while size <= min(ranks, max_group):
        fits = length % (2 * tile * size) == 0 if exact_tiles else -(-length // tile) >= 2 * size
        if ranks % size == 0 and (size == 1 or fits):
            groups += [(start, size) for start in range(0, ranks, size)]
        size *= 2
    return groups


def objectives(lengths, ranks, choices, *, tile=128, token_tolerance=0.10, attention_tolerance=0.05) -> np.ndarray:
    """One row per placement: violation, the ten profile entries, communication, distinct groups, D_W, D_T.

    choices: per sequence a list of (start, size); the placements are their product, in C order.
    """
    counts = [len(options) for options in choices]
    index = np.stack(np.unravel_index(np.arange(math.prod(counts)), counts), axis=1)
    tokens = np.zeros((len(index), ranks), dtype=np.int64)
    pairs = np.zeros((len(index), ranks), dtype=np.int64)
    profile = np.zeros((len(index), 2 * (len(CUTS) + 1)), dtype=np.int64)
    communication = np.zeros(len(index))
    codes = np.zeros((len(index), len(lengths)), dtype=np.int64)
    for i, (length, options) in enumerate(zip(lengths, choices, strict=True)):
        held, work = np.zeros((2, len(options), ranks), dtype=np.int64)
        for row, (start, size) in enumerate(options):
            held[row, start : start + size], work[row, start : start + size] = deal(length, size, tile)
        sizes = np.asarray([size for _, size in options], dtype=np.int64)
        chosen = index[:, i]
        tokens += held[chosen]
        pairs += work[chosen]
        column = 2 * sum(length > cut for cut in CUTS)
        profile[:, column] += (sizes > 1)[chosen]
        profile[:, column + 1] += np.log2(sizes).astype(np.int64)[chosen]
        communication += (length * (sizes - 1) / sizes)[chosen]
        codes[:, i] = np.asarray([start * (ranks + 1) + size for start, size in options])[chosen]
    codes.sort(axis=1)
    distinct = 1 + (np.diff(codes, axis=1) != 0).sum(axis=1)
    token_imbalance, attention_imbalance = (
        np.abs(x / (x.sum(axis=1, keepdims=True) / ranks) - 1).max(axis=1) for x in (tokens, pairs)
    )
    violation = np.maximum(0, np.maximum(token_imbalance - token_tolerance, attention_imbalance - attention_tolerance))
    return np.column_stack([violation, profile, communication, distinct, attention_imbalance, token_imbalance])


def best_placement(lengths, ranks, *, tile=128, exact_tiles=False, max_group=8, **tolerances) -> Best:
    """The lexicographic optimum over every legal placement."""
    choices = [legal_groups(x, ranks, tile=tile, exact_tiles=exact_tiles, max_group=max_group) for x in lengths]
    table = objectives(lengths, ranks, choices, tile=tile, **tolerances)
    alive = np.arange(len(table))
    for column in range(table.shape[1]):
        values = table[alive, column]
        least = values.min()
        alive = alive[values <= least + CLOSE * max(abs(least), 1e-3)]
    row = int(alive[0])
    picks = np.unravel_index(row, [len(options) for options in choices])
    groups = tuple(options[int(pick)] for options, pick in zip(choices, picks, strict=True))
    return Best(groups, tuple(table[row].tolist()), len(table))


def objective(lengths, ranks, groups, *, tile=128, **tolerances) -> tuple[float, ...]:
    """The objective of one given placement, by the same counting."""
    return tuple(objectives(lengths, ranks, [[tuple(g)] for g in groups], tile=tile, **tolerances)[0].tolist())


def same(left, right) -> bool:
    """Whether two objectives are equal, floats within ``CLOSE``."""
    return all(math.isclose(a, b, rel_tol=CLOSE, abs_tol=CLOSE * 1e-3) for a, b in zip(left, right, strict=True))


def random_cases(count: int, *, exact_tiles: bool, seed: int = 0, ranks: int = 4):
    """``count`` steps of 1 to 6 sequences of 512 to 32,768 tokens, log-uniform; ``exact_tiles``: multiples of 512."""
    rng = np.random.default_rng([seed, exact_tiles])
    cases = []
    for _ in range(count):
        drawn = np.exp(rng.uniform(math.log(512), math.log(32768), size=int(rng.integers(1, 7))))
        lengths = np.rint(drawn / 512) * 512 if exact_tiles else np.rint(drawn)
        cases.append(([int(x) for x in lengths], ranks))
    return cases
