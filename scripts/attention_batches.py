"""The batches of sequence lengths that ``benchmark_attention.py`` measures, in cells of one distribution and size."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from buddyring.distributions import NAMES, batch


class BatchesError(ValueError):
    """A file of batches that cannot be read; the message names it and what is wrong."""


@dataclass(frozen=True)
class Batch:
    """One step's lengths. source: ``file`` or ``own``. baseline_ms: by pass (``fwd``, ``bwd``), where there is one."""

    source: str
    distribution: str
    tokens: int
    index: int
    lengths: tuple[int, ...]
    baseline_ms: dict[str, float]

    @property
    def cell(self) -> str:
        """Such as ``file prolong 32K``."""
        return f"{self.source} {self.distribution} {self.tokens // 1024}K"


@dataclass(frozen=True)
class Cell:
    """The batches of one source, distribution and number of tokens, under their common ``label``."""

    label: str
    batches: tuple[Batch, ...]


def read_batches(path: Path) -> list[Batch]:
    """The batches of a JSON file: ``{"batches": [{distribution, tokens, batch, lengths, baseline_ms}, ...]}``.

    Raises BatchesError.
    """
    try:
        made = [
            Batch(
                "file",
                str(each["distribution"]),
                int(each["tokens"]),
                int(each["batch"]),
                tuple(int(length) for length in each["lengths"]),
                {str(key): float(value) for key, value in each.get("baseline_ms", {}).items()},
            )
            for each in json.loads(path.read_text())["batches"]
        ]
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise BatchesError(f"{path} is no file of batches: {type(error).__name__}: {error}") from error
    for each in made:
        if sum(each.lengths) != each.tokens or min(each.lengths, default=0) < 1:
            raise BatchesError(f"{path}: batch {each.index} of {each.distribution} does not hold {each.tokens} tokens")
    return made


def own_batches(tokens: Iterable[int], count: int, seed: int = 0) -> list[Batch]:
    """``count`` batches of every distribution of ``buddyring.distributions`` and size; lengths are not rounded."""
    return [
        Batch("own", name, size, index, batch(name, size, seed=seed, index=index), {})
        for name in NAMES
        for size in tokens
        for index in range(count)
    ]


def cells(batches: Sequence[Batch], distributions: Sequence[str] = (), tokens: Sequence[int] = ()) -> list[Cell]:
    """The batches by cell, in order of their first appearance; empty selections select everything."""
    found: dict[str, list[Batch]] = {}
    for each in batches:
        if (not distributions or each.distribution in distributions) and (not tokens or each.tokens in tokens):
            found.setdefault(each.cell, []).append(each)
    return [Cell(label, tuple(members)) for label, members in found.items()]
