"""How a scheduler does over many steps, and plain tables to print it in."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from buddyring.placement import Placement


@dataclass(frozen=True)
class Summary:
    """A scheduler over several steps. Means are over steps; imbalances are fractions of the mean load of a rank.

    within: share of steps inside both tolerances. shards, communication (tokens), groups (distinct ones): means per
    step. mixed: share of steps that use more than one group size. aligned: share of steps whose groups are aligned.
    planning_ms: median, 95th percentile and maximum of the time of one plan; zeros when it was not measured.
    """

    scheduler: str
    steps: int
    token_mean: float
    token_worst: float
    attention_mean: float
    attention_worst: float
    within: float
    shards: float
    communication: float
    groups: float
    mixed: float
    aligned: float
    planning_ms: tuple[float, float, float]


def is_mixed(placement: Placement) -> bool:
    """Whether the step uses more than one group size."""
    return len({size for _, size in placement.groups}) > 1


def summarise(placements: Sequence[Placement], planning_ms: Sequence[float] = ()) -> Summary:
    """The summary of at least one step, all by one scheduler."""

    def mean(values: Iterable[float]) -> float:
        return float(np.mean(list(values)))

    times = np.percentile(planning_ms, [50, 95, 100]).tolist() if len(planning_ms) else [0.0, 0.0, 0.0]
    return Summary(
        scheduler=placements[0].scheduler,
        steps=len(placements),
        token_mean=mean(p.token_imbalance for p in placements),
        token_worst=max(p.token_imbalance for p in placements),
        attention_mean=mean(p.attention_imbalance for p in placements),
        attention_worst=max(p.attention_imbalance for p in placements),
        within=mean(p.violation == 0 for p in placements),
        shards=mean(p.num_shards for p in placements),
        communication=mean(p.communication for p in placements),
        groups=mean(p.num_distinct_groups for p in placements),
        mixed=mean(is_mixed(p) for p in placements),
        aligned=mean(p.aligned for p in placements),
        planning_ms=(times[0], times[1], times[2]),
    )


def timed(make, *args, **options) -> tuple[Placement, float]:
    """``make(*args, **options)`` and the milliseconds it took."""
    begin = time.perf_counter()
    placement = make(*args, **options)
    return placement, 1e3 * (time.perf_counter() - begin)


def format_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a table: the first column to the left, the others to the right, two spaces between.

    A header cell may have two lines, parted by ``\\n``.
    """
    upper, lower = zip(*(cell.partition("\n")[::2] for cell in header), strict=True)
    cells = [row for row in (upper, lower) if any(row)] + [tuple(row) for row in rows]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    return [
        "  ".join(
            c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]


COMPARE_HEADER = (
    "scheduler",
    "tokens\nmean",
    "\nworst",
    "attention\nmean",
    "\nworst",
    "within\nboth",
    "shards",
    "tokens\nsent",
    "distinct\ngroups",
    "mixed\nsizes",
    "aligned",
    "plan ms\np50",
    "\np95",
)


def compare_row(summary: Summary) -> list[str]:
    """One scheduler as a row under ``COMPARE_HEADER``."""
    s = summary
    return [
        s.scheduler,
        f"{s.token_mean:.1%}",
        f"{s.token_worst:.1%}",
        f"{s.attention_mean:.1%}",
        f"{s.attention_worst:.1%}",
        f"{s.within:.0%}",
        f"{s.shards:,.1f}",
        f"{s.communication:,.0f}",
        f"{s.groups:,.1f}",
        f"{s.mixed:.0%}",
        "yes" if s.aligned == 1 else f"{s.aligned:.0%}",
        f"{s.planning_ms[0]:.2f}",
        f"{s.planning_ms[1]:.2f}",
    ]
