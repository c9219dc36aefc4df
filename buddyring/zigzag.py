"""How one split sequence is dealt to the ranks of its group.

A group of ``size`` ranks cuts a sequence into ``2 * size`` chunks; place ``p`` of the group holds chunks ``p`` and
``2 * size - 1 - p``, so that every place sees about the same number of causal query-key pairs (LiquidCP, section 2.1).
The paper wants ``256 * size`` to divide the length. Here tiles are dealt instead, as ``numpy.array_split`` deals items,
so that any length works without padding tokens and no place is systematically light.
"""

from __future__ import annotations

import numpy as np

TILE = 128


def chunk_bounds(lengths: np.ndarray, size: int, tile: int = TILE) -> np.ndarray:
    """Chunk boundaries of sequences that are all dealt to groups of ``size`` ranks.

    lengths: ``[n]`` integers, tokens. size: ranks of the group. tile: tokens of a tile.
    Returns ``[n, 2 * size + 1]`` int64 positions; chunk ``c`` of sequence ``i`` is ``[b[i, c], b[i, c + 1])``.
    A sequence with fewer than ``2 * size`` tiles is dealt by single tokens. With ``size == 1`` the first chunk is
    the whole sequence and the second one empty.
    Raises ValueError for a sequence with fewer than ``2 * size`` tokens when ``size > 1``.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    if size == 1:
        return np.stack([np.zeros_like(lengths), lengths, lengths], axis=1)
    chunks = 2 * size
    short = np.flatnonzero(lengths < chunks)
    if short.size:
        raise ValueError(
            f"a sequence of {int(lengths[short[0]])} tokens cannot be dealt to {size} ranks: "
            f"it needs at least {chunks} tokens; use a smaller group"
        )
    tiles = -(-lengths // tile)
    by_tile = tiles >= chunks
    units = np.where(by_tile, tiles, lengths)
    unit_tokens = np.where(by_tile, tile, 1)
    share, longer = np.divmod(units, chunks)
    index = np.arange(chunks + 1, dtype=np.int64)
    bounds = index * share[:, None] + np.minimum(index, longer[:, None])
    return np.minimum(bounds * unit_tokens[:, None], lengths[:, None])


def held_chunks(lengths: np.ndarray, size: int, place: np.ndarray | int, tile: int = TILE) -> np.ndarray:
    """The two position ranges that ``place`` holds of each sequence: ``[n, 2, 2]`` int64, (first, past-the-last)."""
    bounds = chunk_bounds(lengths, size, tile)
    n = len(bounds)
    rows = np.arange(n)
    front = np.broadcast_to(np.asarray(place, dtype=np.int64), (n,))
    back = 2 * size - 1 - front
    out = np.empty((n, 2, 2), dtype=np.int64)
    for side, chunk in enumerate((front, back)):
        out[:, side, 0] = bounds[rows, chunk]
        out[:, side, 1] = bounds[rows, chunk + 1]
    return out


def causal_pairs(first: np.ndarray, last: np.ndarray) -> np.ndarray:
    """Query-key pairs of queries at positions ``[first, last)`` under a causal mask (a query sees itself)."""
    return (last * (last + 1) - first * (first + 1)) // 2


def place_loads(lengths: np.ndarray, size: int, tile: int = TILE) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and causal query-key pairs of every place of a group: two ``[n, size]`` int64 arrays."""
    bounds = chunk_bounds(lengths, size, tile)
    tokens = np.diff(bounds, axis=1)
    pairs = causal_pairs(bounds[:, :-1], bounds[:, 1:])
    return tokens[:, :size] + tokens[:, size:][:, ::-1], pairs[:, :size] + pairs[:, size:][:, ::-1]
