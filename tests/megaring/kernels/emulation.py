"""The forward kernel's walk in NumPy: the same arrays, order, masks and tails, in fp64, with every buffer poisoned.

It reads of each tile the 128 rows that the copy engine would bring, whatever they hold, so a mask or a tail that the
kernel forgets shows up as NaN here as well.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from megaring.kernels.forward_plan import TILE, ForwardPlan


def poisoned(rows: int, *shape: int) -> np.ndarray:
    """A tensor of NaN."""
    return np.full((rows, *shape), np.nan)


def walk(plan: ForwardPlan, tile: np.ndarray) -> Iterator[tuple[int, int, bool, bool]]:
    """(row, valid keys, in the arena, diagonal) of each key tile of one query tile, as the producer issues them."""
    _, _, begin, end, first_tokens, kv_tiles, _, _ = tile.tolist()
    row, _, remote, _ = plan.segments[begin].tolist()
    assert remote == 0
    last = (first_tokens - 1) // TILE
    count = 0
    for at in range(last, -1, -1):
        yield row + at * TILE, min(TILE, first_tokens - at * TILE), False, plan.causal and at == last
        count += 1
    for row, tokens, remote, _ in plan.segments[begin + 1 : end].tolist():
        for at in range(0, tokens, TILE):
            yield row + at, min(TILE, tokens - at), bool(remote), False
            count += 1
    assert count == kv_tiles, "the kernel would stop at kv_tiles"


def deliver(plans: list[ForwardPlan], tensors: list[np.ndarray]) -> list[np.ndarray]:
    """Arenas of all ranks after all sends. tensors: per rank ``[rows, heads, D]``."""
    arenas = [poisoned(max(1, plan.arena_tiles) * TILE, *tensors[0].shape[1:]) for plan in plans]
    written = [np.zeros(len(arena), dtype=int) for arena in arenas]
    for plan, tensor in zip(plans, tensors, strict=True):
        for source, tokens, peer, row in plan.sends.tolist():
            assert peer != plan.rank and row % TILE == 0 and 0 < tokens <= TILE
            arenas[peer][row : row + tokens] = tensor[source : source + tokens]
            written[peer][row : row + tokens] += 1
    assert all(each.max(initial=0) <= 1 for each in written), "a tile of an arena is sent twice"
    return arenas


def attend(
    plan: ForwardPlan, q: np.ndarray, k: np.ndarray, v: np.ndarray, arenas: tuple[np.ndarray, np.ndarray], scale: float
) -> tuple[np.ndarray, np.ndarray]:
    """Output and LSE of one rank. q: ``[rows, Hq, D]``; k, v: ``[rows, Hkv, D]``; arenas of K and of V."""
    output, lse = poisoned(*q.shape), poisoned(*q.shape[:2])
    output[plan.tokens :], lse[plan.tokens :] = 0.0, -np.inf
    ratio = q.shape[1] // k.shape[1]
    for tile in plan.tiles:
        first, rows = int(tile[0]), int(tile[1])
        query = _rows(q, first)
        maximum = np.full((TILE, q.shape[1]), -np.inf)
        total = np.zeros((TILE, q.shape[1]))
        weighted = np.zeros(query.shape)
        for row, valid, remote, diagonal in walk(plan, tile):
            keys, values = (_rows(arenas[part] if remote else local, row) for part, local in enumerate((k, v)))
            values[valid:] = 0.0
            scores = np.einsum("qhd,khd->qhk", query, keys.repeat(ratio, axis=1)) * scale
            limit = np.minimum(valid, np.arange(TILE) + 1) if diagonal else np.full(TILE, valid)
            scores = np.where(np.arange(TILE) >= limit[:, None, None], -np.inf, scores)
            top = np.maximum(maximum, scores.max(axis=2))
            shrink = np.exp(maximum - top)
            p = np.exp(scores - top[:, :, None])
            total = total * shrink + p.sum(axis=2)
            weighted = weighted * shrink[:, :, None] + np.einsum("qhk,khd->qhd", p, values.repeat(ratio, axis=1))
            maximum = top
        assert np.isnan(output[first : first + rows]).all(), "a query tile is covered twice"
        output[first : first + rows] = (weighted / total[:, :, None])[:rows]
        lse[first : first + rows] = (maximum + np.log(total))[:rows]
    return output, lse


def _rows(tensor: np.ndarray, first: int) -> np.ndarray:
    """128 rows from ``first`` on; those past the tensor arrive as zeros."""
    found = tensor[first : first + TILE]
    return np.concatenate([found, np.zeros((TILE - len(found), *tensor.shape[1:]))])
