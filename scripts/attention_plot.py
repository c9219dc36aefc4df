"""Pictures of what ``benchmark_attention.py`` measured. Needs matplotlib."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from attention_tables import summaries

COLOURS = ("#c8553d", "#56b4e9", "#f0a202", "#7b8794", "#7b4b94", "#c9d6df")  # ours stands out


def draw(suite: str, rows: Sequence[dict], path: Path) -> None:
    """Bars of the suite's main figure; the format is the ending of ``path``. Needs matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    title, unit, line, series = _series(suite, rows)
    labels = list(dict.fromkeys(label for values in series.values() for label in values))
    figure = Figure(figsize=(max(6.0, 0.55 * len(labels) + 2.5), 4.2), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    width = 0.8 / max(1, len(series))
    for place, (name, values) in enumerate(series.items()):
        at = [i + (place - (len(series) - 1) / 2) * width for i in range(len(labels))]
        heights = [values.get(label, math.nan) for label in labels]
        axes.bar(at, heights, width * 0.92, label=name, color=COLOURS[place % len(COLOURS)])
    if line is not None:
        axes.axhline(line, color="black", linestyle=(0, (4, 3)), linewidth=1)
    axes.set_xticks(range(len(labels)), labels, rotation=40 if len(labels) > 5 else 0, ha="right", fontsize=8)
    if len(labels) <= 5:
        axes.set_xticks(range(len(labels)), labels, rotation=0, ha="center")
    axes.set_ylabel(unit)
    axes.set_title(title, fontsize=11, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    if len(series) > 1:
        axes.legend(frameon=False, ncols=len(series), fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _series(suite: str, rows: Sequence[dict]) -> tuple[str, str, float | None, dict[str, dict[str, float]]]:
    """Title, unit, height of a line across, and the bars of each series by label."""
    series: dict[str, dict[str, float]] = {}
    what = "Backward" if any(row.get("pass") == "bwd" for row in rows) else "Forward"
    if suite == "shapes":
        for row in rows:
            if "contender" in row:
                series.setdefault(row["contender"], {})[row["shape"]] = row["tflops"]
        return f"{what}, 32 query and 8 KV heads of 128, bf16, causal", "TFLOP/s of useful work", None, series
    if suite == "virtual":
        values = {f"{row['cell']} {row['batch']}": row["of_serial"] for row in rows if "of_serial" in row}
        return f"{what} of virtual ranks on one GPU", "speed over one rank with the whole work", 1.0, {"fused": values}
    found = summaries(rows)
    if any(each.speedup is not None for each in found):
        values = {each.cell: each.speedup for each in found if each.speedup is not None}
        return f"{what} over the fastest baseline of each batch, normalised", "times faster", 1.0, {"fused": values}
    values = {each.cell: each.normalised_tflops for each in found}
    return f"{what} of batches of different lengths", "TFLOP/s per GPU, normalised", None, {"fused": values}
