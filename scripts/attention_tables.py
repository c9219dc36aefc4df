"""Tables of what ``benchmark_attention.py`` measured, and the sums behind them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from buddyring.table import format_table

LEAST_CELL = 0.98  # what no cell should fall below
OURS = ("fused", "buddyring")


@dataclass(frozen=True)
class CellSummary:
    """Ours over the batches of a cell: sums of operations over sums of times, and the geometric mean over baselines.

    others: of the first batch, (executor, scheduler, its time over ours); None where it did not run.
    """

    cell: str
    batches: int
    tflops: float
    normalised_tflops: float
    speedup: float | None
    attention_imbalance: float
    others: tuple[tuple[str, str, float | None], ...]


def geometric_mean(values: Sequence[float]) -> float:
    """NaN of nothing."""
    return math.exp(statistics.fmean(map(math.log, values))) if values else math.nan


def summaries(rows: Sequence[dict]) -> list[CellSummary]:
    """One per cell in which ours ran, in order."""
    made = []
    for cell in dict.fromkeys(row["cell"] for row in rows):
        of_cell = [row for row in rows if row["cell"] == cell and "executor" in row]
        ours = [row for row in of_cell if (row["executor"], row["scheduler"]) == OURS and "median_ms" in row]
        if not ours:
            continue
        gflop, gpus = sum(row["gflop"] for row in ours), ours[0]["gpus"]
        first = ours[0]
        others = tuple(
            (row["executor"], row["scheduler"], row["median_ms"] / first["median_ms"] if "median_ms" in row else None)
            for row in of_cell
            if (row["executor"], row["scheduler"]) != OURS and row["batch"] == first["batch"]
        )
        speedups = [row["speedup"] for row in ours if "speedup" in row]
        made.append(
            CellSummary(
                cell=cell,
                batches=len(ours),
                tflops=gflop / sum(row["median_ms"] for row in ours) / gpus,
                normalised_tflops=gflop / sum(row["normalised_ms"] for row in ours) / gpus,
                speedup=geometric_mean(speedups) if speedups else None,
                attention_imbalance=max(row["attention_imbalance"] for row in ours),
                others=others,
            )
        )
    return made


def print_cells(rows: Sequence[dict]) -> None:
    """One line per cell, those of the others beside it, and what all cells make together."""
    found = summaries(rows)
    print("\nTFLOP/s per GPU (on a machine of the reference); 'over baseline' is a geometric mean, of normalised times")
    header = (
        "cell",
        "batches",
        "TFLOP/s",
        "normalised",
        "over baseline",
        "worst imbalance",
        "first batch: time / ours",
    )
    table = [
        [
            each.cell,
            str(each.batches),
            f"{each.tflops:.0f}",
            f"{each.normalised_tflops:.0f}",
            "" if each.speedup is None else f"{each.speedup:.3f}x",
            f"{each.attention_imbalance:.1%}",
            ", ".join(
                f"{executor} {scheduler} {'-' if ratio is None else f'{ratio:.2f}'}"
                for executor, scheduler, ratio in each.others
            ),
        ]
        for each in found
    ]
    print("\n".join(format_table(header, table)))
    speedups = [row["speedup"] for row in rows if "speedup" in row and (row["executor"], row["scheduler"]) == OURS]
    if speedups:
        low = [each for each in found if each.speedup is not None and each.speedup < LEAST_CELL]
        print(
            f"over the baselines of {len(speedups)} batches: {geometric_mean(speedups):.3f}x; cells below "
            f"{LEAST_CELL}x: {', '.join(f'{each.cell} ({each.speedup:.3f}x)' for each in low) or 'none'}"
        )
    for row in rows:
        if row.get("error"):
            print(f"{row['cell']}: {row['executor']} with {row['scheduler']} is refused: {row['error']}")
        if row.get("wrong"):
            print(f"{row['cell']}: {row['executor']} with {row['scheduler']} differs by {row['difference']:.1e}")


def print_shapes(rows: Sequence[dict]) -> None:
    """Contenders by shape: TFLOP/s and speed over cuDNN."""
    timed = [row for row in rows if "contender" in row]
    shapes = list(dict.fromkeys(row["shape"] for row in timed))
    by_place = {(row["contender"], row["shape"]): row for row in timed}

    def entry(name: str, shape: str) -> str:
        row = by_place.get((name, shape))
        if row is None:
            return "-"
        return f"{row['tflops']:.0f}" + (f" ({row['speed']:.3f}x)" if row["speed"] else "")

    names = list(dict.fromkeys(row["contender"] for row in timed))
    print("\nTFLOP/s of useful work (speed over cuDNN, median of the ratios of each round)")
    print("\n".join(format_table(("", *shapes), [[name, *(entry(name, shape) for shape in shapes)] for name in names])))


def print_virtual(rows: Sequence[dict]) -> None:
    """Virtual ranks beside the same work on one rank, by batch."""
    print("\nOne launch for all virtual ranks beside the same sequences whole on one rank of the whole GPU")
    header = ("batch", "ranks", "sequences", "split", "imbalance", "ms", "serial ms", "of serial")
    table = [
        [
            f"{row['cell']} {row['batch']}",
            str(row["ranks"]),
            str(row["sequences"]),
            str(row["split"]),
            f"{row['attention_imbalance']:.1%}",
            *(f"{row[key]:.3f}" if key in row else "-" for key in ("virtual_ms", "serial_ms", "of_serial")),
        ]
        for row in rows
    ]
    print("\n".join(format_table(header, table)))
    ratios = [row["of_serial"] for row in rows if "of_serial" in row]
    print(f"geometric mean over {len(ratios)} batches: {geometric_mean(ratios):.3f} of the serial speed")


PRINT = {"shapes": print_shapes, "ranks": print_cells, "virtual": print_virtual}
