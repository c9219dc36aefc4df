"""A picture of a run: layouts, running and waiting sequences, cache use and step times over time. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from megaring.errors import UserError
from megaring.rollout.layout import LAYOUTS
from megaring.rollout.metrics import StepRecord

_COLOURS = dict(zip(LAYOUTS, ("#4c78a8", "#f58518", "#54a24b", "#b279a2"), strict=True))


def draw_timeline(steps: Sequence[StepRecord], path: Path, *, title: str = "") -> Path:
    """Write the picture to ``path`` (format by its ending) and return the path.

    Bands behind all panels are layouts. Raises UserError without matplotlib, without steps, or for an ending that
    cannot be written; OSError when the file cannot be.
    """
    if not steps:
        raise UserError("there is no step to draw; run at least one request")
    figure = new_figure(path)
    top, middle, bottom = figure.subplots(3, 1, sharex=True, height_ratios=(2, 1, 2))
    begins = [step.began for step in steps]
    ends = [step.began + step.seconds for step in steps]
    top.step(ends, [step.running for step in steps], where="post", color="black", label="running")
    top.step(ends, [step.waiting for step in steps], where="post", color="black", linestyle=":", label="waiting")
    top.set_ylabel("sequences")
    top.legend(loc="upper right", fontsize=8)
    middle.step(ends, [100 * step.kv_use for step in steps], where="post", color="black")
    middle.set_ylabel("KV use (%)")
    middle.set_ylim(0, 105)
    switching = [step.switched_from is not None for step in steps]
    for chosen, marker, label in ((False, ".", "step"), (True, "x", "step with a switch")):
        points = [(a, step.seconds * 1e3) for a, step, s in zip(begins, steps, switching, strict=True) if s is chosen]
        if points:
            bottom.scatter(
                *zip(*points, strict=True), marker=marker, color="red" if chosen else "black", s=18, label=label
            )
    bottom.set_yscale("log")
    bottom.set_ylabel("step time (ms)")
    bottom.set_xlabel("seconds")
    bottom.legend(loc="upper right", fontsize=8)
    _draw_layouts(steps, (top, middle, bottom))
    top.set_title(title or f"{len(steps)} steps, {sum(switching)} switches", fontsize=11)
    figure.savefig(path)
    return path


def new_figure(path: Path):
    """A figure that can be saved at ``path``. Raises UserError without matplotlib, or for an ending it cannot write."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError(f"drawing needs matplotlib ({error}); pip install 'megaring[plot]'") from None
    figure = Figure(figsize=(11, 7), dpi=150, layout="constrained")
    known = FigureCanvasAgg(figure).get_supported_filetypes()
    if path.suffix.lower().lstrip(".") not in known:
        raise UserError(f"cannot draw to {path}: its name must end in one of .{', .'.join(sorted(known))}")
    return figure


def _draw_layouts(steps: Sequence[StepRecord], panels) -> None:
    from matplotlib.patches import Patch

    for name, run in groupby(steps, key=lambda step: step.layout):
        stretch = list(run)
        for panel in panels:
            panel.axvspan(
                stretch[0].began, stretch[-1].began + stretch[-1].seconds, color=_COLOURS[name], alpha=0.25, linewidth=0
            )
    used = [name for name in LAYOUTS if any(step.layout == name for step in steps)]
    handles = [Patch(color=_COLOURS[name], alpha=0.4, label=name) for name in used]
    panels[0].figure.legend(handles=handles, loc="outside lower center", ncols=len(used), fontsize=9)
