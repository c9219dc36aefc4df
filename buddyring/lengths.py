"""What counts as a list of sequence lengths."""

from __future__ import annotations

import operator
from collections.abc import Iterable

import numpy as np

MAX_LENGTH = 2**31 - 1  # positions and cu_seqlens are int32 on the device


def check_lengths(lengths: Iterable[int]) -> np.ndarray:
    """``lengths`` as ``[n]`` int64 (tokens), or an error that names the first bad entry.

    Raises TypeError for anything but integers (bools, floats, NaN and strings included) and ValueError for lengths
    below 1 or above ``MAX_LENGTH``.
    """
    if isinstance(lengths, (str, bytes)):
        raise TypeError(f"lengths must be an iterable of integers, not the string {lengths!r}")
    if isinstance(lengths, np.ndarray):
        if lengths.ndim != 1:
            raise TypeError(f"lengths must be one-dimensional, not an array of shape {lengths.shape}")
        if lengths.size and lengths.dtype.kind not in "iu":
            raise TypeError(f"lengths must be integers, not an array of {lengths.dtype}")
        _check_range(lengths)
        return lengths.astype(np.int64)
    try:
        items = list(lengths)
    except TypeError:
        raise TypeError(f"lengths must be an iterable of integers, not {type(lengths).__name__}") from None
    if not all(type(item) is int for item in items):
        items = [_as_int(index, item) for index, item in enumerate(items)]
    for index, item in enumerate(items):
        if not 1 <= item <= MAX_LENGTH:
            _refuse(index, item)
    return np.asarray(items, dtype=np.int64)


def _as_int(index: int, item: object) -> int:
    is_bool = isinstance(item, bool) or "bool" in str(getattr(item, "dtype", ""))
    if not is_bool:
        try:
            return operator.index(item)  # type: ignore[arg-type]
        except TypeError:
            pass
    raise TypeError(f"length {index} is {item!r} ({type(item).__name__}); lengths are integers")


def _check_range(lengths: np.ndarray) -> None:
    bad = np.flatnonzero((lengths < 1) | (lengths > MAX_LENGTH))
    if bad.size:
        _refuse(int(bad[0]), int(lengths[bad[0]]))


def _refuse(index: int, item: int) -> None:
    why = "every sequence has at least one token" if item < 1 else f"the most is {MAX_LENGTH}"
    raise ValueError(f"length {index} is {item}; {why}")
