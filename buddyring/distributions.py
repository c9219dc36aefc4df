"""Sequence lengths to plan and measure with: five made-up distributions and one real one.

The five are stand-ins for the data sets they are named after. Nobody's documents were counted: each is a log-normal
with a median and a sigma chosen to give that data set's mix of short and long (ProLong adds its packed 64K sequences).
Lengths are whole tokens and not rounded to anything, as real documents are not.

    prolong   60 % exactly 65,536; 40 % log-normal, median 1,024, sigma 1
    arxiv     log-normal, median 12,288, sigma 0.8
    freelaw   log-normal, median 2,560, sigma 1.1
    github    log-normal, median 800, sigma 1.5
    pile_cc   log-normal, median 560, sigma 0.95

``stdlib`` is real: the byte lengths of the source files of the Python standard library that runs this, in a seeded
order.
"""

from __future__ import annotations

import math
import sysconfig
import zlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

_BLOCK = 1024  # lengths drawn at a time


@dataclass(frozen=True)
class Mixture:
    """A log-normal of ``median`` tokens and ``sigma``; with probability ``fixed_share`` exactly ``fixed`` instead."""

    median: float
    sigma: float
    fixed: int = 0
    fixed_share: float = 0.0

    def draw(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """``[count]`` int64 lengths in tokens, each at least 1."""
        lengths = np.rint(rng.lognormal(math.log(self.median), self.sigma, size=count)).astype(np.int64)
        is_fixed = rng.random(count) < self.fixed_share
        return np.maximum(1, np.where(is_fixed, self.fixed, lengths))


MIXTURES = {
    "prolong": Mixture(1024, 1.0, fixed=65536, fixed_share=0.6),
    "arxiv": Mixture(12288, 0.8),
    "freelaw": Mixture(2560, 1.1),
    "github": Mixture(800, 1.5),
    "pile_cc": Mixture(560, 0.95),
}
NAMES = (*MIXTURES, "stdlib")


def batch(name: str, tokens: int, *, seed: int = 0, index: int = 0) -> tuple[int, ...]:
    """Lengths drawn from ``name`` until they hold exactly ``tokens`` tokens; the last one is cut to fit.

    The same arguments give the same batch (with one version of NumPy, and for ``stdlib`` of Python); batches of one
    ``seed`` and different ``index`` are independent. ``stdlib`` draws without replacement, again and again if need be.
    Raises ValueError for an unknown name, fewer than 1 token or a negative seed or index.
    """
    if name not in NAMES:
        raise ValueError(f"unknown distribution {name!r}; there are {', '.join(NAMES)}")
    if tokens < 1:
        raise ValueError(f"a batch has at least 1 token, not {tokens}")
    if seed < 0 or index < 0:
        raise ValueError(f"seed and index are not negative, unlike {seed} and {index}")
    rng = np.random.default_rng([zlib.crc32(name.encode()), seed, index])
    drawn: list[np.ndarray] = []
    total = 0
    while total < tokens:
        block = rng.permutation(stdlib_lengths()) if name == "stdlib" else MIXTURES[name].draw(rng, _BLOCK)
        drawn.append(block)
        total += int(block.sum())
    lengths = np.concatenate(drawn)
    ends = np.cumsum(lengths)
    last = int(np.searchsorted(ends, tokens))
    lengths[last] -= ends[last] - tokens
    return tuple(lengths[: last + 1].tolist())


@cache
def stdlib_files() -> tuple[Path, ...]:
    """The ``.py`` files of this Python's standard library, sorted by path, without tests and installed packages.

    Empty files are left out. Raises FileNotFoundError when there are none, as in a Python whose library is an archive.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    files = [
        path
        for path in root.rglob("*.py")
        if not skipped.intersection(path.relative_to(root).parts[:-1]) and path.stat().st_size > 0
    ]
    if not files:
        raise FileNotFoundError(f"no Python source files under {root}; this Python ships its library without sources")
    return tuple(sorted(files))


def stdlib_lengths() -> np.ndarray:
    """Byte lengths of ``stdlib_files()``, in that order: ``[n]`` int64."""
    return np.asarray([path.stat().st_size for path in stdlib_files()], dtype=np.int64)
