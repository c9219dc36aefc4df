"""A stable sort that compiles in a moment (Numba's own take seconds each)."""

from __future__ import annotations

import numpy as np

from buddyring.search.kernels.jit import kernel


@kernel
def ascending(values):
    """``[n]`` int64 indices that sort ``values`` (``[n]`` float64); equal ones stay in order. Merge sort."""
    count = len(values)
    order, other = np.empty(count, dtype=np.int64), np.empty(count, dtype=np.int64)
    for k in range(count):
        order[k] = k
    run = 1
    while run < count:
        for first in range(0, count, 2 * run):
            middle, last = min(first + run, count), min(first + 2 * run, count)
            a, b = first, middle
            for k in range(first, last):
                if a < middle and (b >= last or values[order[a]] <= values[order[b]]):
                    other[k] = order[a]
                    a += 1
                else:
                    other[k] = order[b]
                    b += 1
        order, other = other, order
        run *= 2
    return order
