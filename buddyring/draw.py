"""A picture of one placement: tokens and attention work of every rank, side by side. Needs matplotlib."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from buddyring.placement import Placement
from buddyring.zigzag import causal_pairs

# Told apart in the common kinds of colour blindness, and by lightness in grey.
_COLOURS = {1: "#c9d6df", 2: "#56b4e9", 4: "#f0a202", 8: "#c8553d", 16: "#7b4b94"}
_LARGER = "#3d2645"
_BAR = 0.8  # of the distance between two ranks
_MOST_RANKS = 1024  # more would be thinner than a pixel


class DrawingError(RuntimeError):
    """No picture could be made; the message says why and what to do."""


@dataclass(frozen=True, eq=False)
class Segments:
    """One bar piece per shard, ranks in order and each rank's shards in packed order.

    With ``n`` shards: ranks, sequences, sizes (of the group), tokens, pairs (causal query-key pairs): ``[n]`` int64.
    """

    ranks: np.ndarray
    sequences: np.ndarray
    sizes: np.ndarray
    tokens: np.ndarray
    pairs: np.ndarray


def segments(placement: Placement) -> Segments:
    """What each rank holds of each sequence."""
    columns = [np.zeros((5, 0), dtype=np.int64)]
    for rank in range(placement.ranks):
        shards = placement.shards(rank)
        first, last = shards.chunks[:, :, 0], shards.chunks[:, :, 1]
        tokens, pairs = (last - first).sum(axis=1), causal_pairs(first, last).sum(axis=1)
        columns.append(np.stack([np.full_like(tokens, rank), shards.sequences, shards.groups[:, 1], tokens, pairs]))
    return Segments(*np.concatenate(columns, axis=1))


def draw_placement(placement: Placement, path: str | Path, *, title: str | None = None) -> Path:
    """Write the picture of ``placement`` to ``path`` (format by its ending: .png, .svg, .pdf) and return the path.

    Each bar is a rank and each piece the shard of one sequence, coloured by the size of its group. Raises DrawingError
    without matplotlib, for an ending that it cannot write, or for more than 1,024 ranks; OSError when the file cannot
    be written.
    """
    path = Path(path)
    if placement.ranks > _MOST_RANKS:
        raise DrawingError(f"a picture of {placement.ranks} ranks would be unreadable; the most is {_MOST_RANKS}")
    figure = _new_figure(path, height=min(14.0, 2.0 + max(0.4 * placement.ranks, 1.2)))
    left, right = figure.subplots(1, 2, sharey=True)
    pieces = segments(placement)
    _draw_panel(left, placement, pieces, pieces.tokens, "tokens", placement.token_tolerance)
    _draw_panel(right, placement, pieces, pieces.pairs, "query-key pairs", placement.attention_tolerance)
    left.set_ylabel("rank")
    left.set_ylim(placement.ranks - 0.5, -0.5)
    if placement.ranks <= 32:
        left.set_yticks(range(placement.ranks))
    left.set_title(f"Tokens: at most {placement.token_imbalance:.1%} from the mean", fontsize=10)
    right.set_title(f"Attention work: at most {placement.attention_imbalance:.1%} from the mean", fontsize=10)
    count = len(placement.lengths)
    heading = f"{placement.scheduler}: {count:,} sequence{'s' * (count != 1)}, {sum(placement.lengths):,} tokens"
    figure.suptitle(title if title is not None else f"{heading}, {placement.ranks} ranks", fontsize=12)
    _draw_legend(figure, placement)
    figure.savefig(path)
    return path


def _new_figure(path: Path, height: float):
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise DrawingError(f"drawing needs matplotlib ({error}); pip install 'megaring[plot]'") from error
    figure = Figure(figsize=(11, height), dpi=150, layout="constrained")
    known = FigureCanvasAgg(figure).get_supported_filetypes()
    ending = path.suffix.lower().lstrip(".")
    if ending not in known:
        raise DrawingError(f"cannot draw to {path}: its name must end in one of .{', .'.join(sorted(known))}")
    return figure


def _draw_panel(axes, placement: Placement, pieces: Segments, loads: np.ndarray, unit: str, tolerance: float) -> None:
    from matplotlib.collections import PolyCollection
    from matplotlib.ticker import EngFormatter

    rank_totals = np.bincount(pieces.ranks, weights=loads, minlength=placement.ranks)
    mean = rank_totals.mean()
    ends = np.cumsum(loads)
    starts = ends - loads
    rank_starts = np.concatenate([[0], np.cumsum(rank_totals)[:-1]])
    left = starts - rank_starts[pieces.ranks]
    right = left + loads
    top, bottom = pieces.ranks - _BAR / 2, pieces.ranks + _BAR / 2
    corners = np.stack([left, top, right, top, right, bottom, left, bottom], axis=1).reshape(-1, 4, 2)
    span = max(rank_totals.max(initial=0.0), mean * (1 + tolerance)) * 1.03 or 1.0
    visible = loads > span / 300  # a border on thinner pieces would hide them
    axes.add_collection(
        PolyCollection(
            corners,
            facecolors=[colour_of(size) for size in pieces.sizes.tolist()],
            edgecolors="white",
            linewidths=np.where(visible, 0.6, 0.0),
        )
    )
    axes.axvspan(mean * (1 - tolerance), mean * (1 + tolerance), color="black", alpha=0.07, linewidth=0, zorder=0)
    axes.axvline(mean, color="black", linestyle=(0, (4, 3)), linewidth=1.1, zorder=2)
    axes.set_xlim(0, span)
    axes.set_xlabel(unit)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.spines[["top", "right"]].set_visible(False)
    if placement.ranks <= 32:
        for i in np.flatnonzero(loads > span / 40):
            label = f"#{pieces.sequences[i]}"
            if loads[i] > span * 0.011 * (len(label) + 1):
                axes.text((left[i] + right[i]) / 2, pieces.ranks[i], label, ha="center", va="center", fontsize=7)


def _draw_legend(figure, placement: Placement) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    sizes = [size for _, size in placement.groups]
    entries = []
    for size in sorted(set(sizes)):
        count = sizes.count(size)
        where = "whole on one rank" if size == 1 else f"over {size} ranks"
        entries.append(Patch(color=colour_of(size), label=f"{where}: {count:,} sequence{'s' * (count != 1)}"))
    entries.append(Line2D([], [], color="black", linestyle="", marker="$\\#$", label="number of the sequence"))
    entries.append(Line2D([], [], color="black", linestyle=(0, (4, 3)), linewidth=1.1, label="mean of the ranks"))
    tolerances = f"{placement.token_tolerance:.0%} of tokens, {placement.attention_tolerance:.0%} of attention"
    entries.append(Patch(color="black", alpha=0.07, label=f"tolerance: {tolerances}"))
    figure.legend(handles=entries, loc="outside lower center", ncols=min(3, len(entries)), fontsize=8, frameon=False)


def colour_of(size: int) -> str:
    """The colour of groups of ``size`` ranks."""
    return _COLOURS.get(size, _LARGER)
