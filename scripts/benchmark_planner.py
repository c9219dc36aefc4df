#!/usr/bin/env python3
"""How fast BuddyRing plans, how even its plans are beside the other schedulers', and how often they are optimal.

Prints three tables and writes their numbers, with machine and versions, as JSON. The lengths are those of
``buddyring.distributions``: five stand-ins and the Python standard library's own files. ``--plot`` draws them.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import inspect
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "buddyring")]

from brute_force import best_placement, objective, random_cases, same  # noqa: E402

from buddyring import SCHEDULERS, plan  # noqa: E402
from buddyring.distributions import NAMES, batch  # noqa: E402
from buddyring.problem import check_problem  # noqa: E402
from buddyring.search.bounds import least_violation  # noqa: E402
from buddyring.search.tables import build_tables  # noqa: E402
from buddyring.table import Summary, format_table, summarise, timed  # noqa: E402

TOKENS_PER_RANK = 16384


@dataclass(frozen=True)
class Speed:
    """Planning times of one distribution on one number of ranks, in milliseconds.

    Percentiles are over all calls; ``best_p95`` is over the fastest call of each batch, which leaves out what else the
    machine did. within: share of batches inside both tolerances. violation: how far the others are outside, mean over
    all batches; forced: the same of a lower bound that no plan is under (``buddyring.search.bounds``). attention_worst:
    the largest attention imbalance of a batch.
    """

    distribution: str
    ranks: int
    batches: int
    calls: int
    p50: float
    p95: float
    most: float
    best_p95: float
    within: float
    violation: float
    forced: float
    attention_worst: float


@dataclass(frozen=True)
class Optimality:
    """Random small cases whose plan has the optimum's objective. ``worse``: the others' lengths."""

    exact_tiles: bool
    cases: int
    optimal: int
    worse: tuple[tuple[int, ...], ...]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and write."""
    options = parse(arguments)
    begin = time.perf_counter()
    warm = time.perf_counter()
    plan(batch("freelaw", 65536), 8)
    warm = time.perf_counter() - warm
    print(f"first plan of this process: {warm:.2f} s (loads or compiles the search)\n", flush=True)
    speeds = [measure_speed(name, 8, options.batches, options.repeats) for name in NAMES]
    for ranks in options.ranks:
        speeds += [measure_speed(name, ranks, options.large_batches, 2) for name in NAMES]
    print_speeds(speeds)
    quality = {name: compare(name, options.batches) for name in NAMES}
    print_quality(quality)
    optimal = [measure_optimality(options.cases, exact_tiles) for exact_tiles in (True, False)]
    for o in optimal:
        kind = "with exact_tiles" if o.exact_tiles else "of any length"
        print(f"optimum found in {o.optimal} of {o.cases} random cases {kind} (4 ranks, 1 to 6 sequences)")
    record = {
        **provenance(arguments),
        "seconds": round(time.perf_counter() - begin, 1),
        "first_plan_seconds": round(warm, 3),
        "speed": [asdict(s) for s in speeds],
        "quality": {name: [asdict(s) for s in rows] for name, rows in quality.items()},
        "optimality": [asdict(o) for o in optimal],
    }
    if options.output is not None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(record, indent=1) + "\n")
        print(f"\nwritten to {options.output}")
    if options.plot is not None:
        draw(quality, options.plot)
        print(f"picture in {options.plot}")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--output", type=Path, metavar="FILE.json", help="where to write the numbers; default: nowhere")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the schedulers' imbalances and shards")
    parser.add_argument("--batches", type=int, default=20, help="batches of each distribution; default: 20")
    parser.add_argument("--large-batches", type=int, default=5, help="the same above 8 ranks; default: 5")
    parser.add_argument("--repeats", type=int, default=5, help="times each batch is planned on 8 ranks; default: 5")
    parser.add_argument("--ranks", type=int, nargs="*", default=[64, 1024], help="larger domains; default: 64 1024")
    parser.add_argument("--cases", type=int, default=200, help="random cases of each kind; default: 200")
    options = parser.parse_args(arguments)
    for name in ("batches", "large_batches", "repeats", "cases"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    return options


def measure_speed(name: str, ranks: int, batches: int, repeats: int) -> Speed:
    """Plan ``batches`` batches of 16K tokens per rank, ``repeats`` times each, batch after batch."""
    lengths = [batch(name, ranks * TOKENS_PER_RANK, index=index) for index in range(batches)]
    plan(lengths[0], ranks)
    times = np.empty((repeats, batches))
    placements = []
    for repeat in range(repeats):
        for index, drawn in enumerate(lengths):
            placement, times[repeat, index] = timed(plan, drawn, ranks)
            if repeat == 0:
                placements.append(placement)
    p50, p95, most = np.percentile(times, [50, 95, 100]).tolist()
    return Speed(
        distribution=name,
        ranks=ranks,
        batches=batches,
        calls=times.size,
        p50=p50,
        p95=p95,
        most=most,
        best_p95=float(np.percentile(times.min(axis=0), 95)),
        within=statistics.mean(p.violation == 0 for p in placements),
        violation=statistics.mean(p.violation for p in placements),
        forced=statistics.mean(forced_violation(drawn, ranks) for drawn in lengths),
        attention_worst=max(p.attention_imbalance for p in placements),
    )


def forced_violation(lengths: Sequence[int], ranks: int) -> float:
    """What the violation of every plan with the default options is at least."""
    parameters = inspect.signature(plan).parameters.values()
    options = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY and p.name != "scheduler"}
    problem = check_problem(sorted(lengths, reverse=True), ranks, **options)
    return least_violation(build_tables(problem, problem.lengths))


def compare(name: str, batches: int) -> list[Summary]:
    """Every scheduler on the same batches of 128K tokens on 8 ranks."""
    lengths = [batch(name, 8 * TOKENS_PER_RANK, index=index) for index in range(batches)]
    summaries = []
    for scheduler in SCHEDULERS:
        plan(lengths[0], 8, scheduler=scheduler)
        planned = [timed(plan, drawn, 8, scheduler=scheduler) for drawn in lengths]
        summaries.append(summarise([placement for placement, _ in planned], [took for _, took in planned]))
    return summaries


def measure_optimality(count: int, exact_tiles: bool) -> Optimality:
    """How many random small cases get a plan as good as the best of all placements."""
    worse = []
    for lengths, ranks in random_cases(count, exact_tiles=exact_tiles):
        best = best_placement(lengths, ranks, exact_tiles=exact_tiles)
        made = plan(lengths, ranks, exact_tiles=exact_tiles)
        if not same(objective(lengths, ranks, made.groups), best.objective):
            worse.append(tuple(lengths))
    return Optimality(exact_tiles, count, count - len(worse), tuple(worse))


def print_speeds(speeds: Sequence[Speed]) -> None:
    """The table of planning times."""
    print(
        "Planning time in ms, 16K tokens a rank (best p95: of the fastest call of each batch; violation: how far\n"
        "batches are outside the tolerances, mean; forced: a lower bound of that, whatever the plan)"
    )
    header = (
        "lengths",
        "ranks",
        "batches",
        "p50",
        "p95",
        "max",
        "best p95",
        "in tolerance",
        "violation",
        "forced",
        "worst attention",
    )
    rows = [
        [
            s.distribution,
            f"{s.ranks:,}",
            str(s.batches),
            *(f"{x:.2f}" for x in (s.p50, s.p95, s.most, s.best_p95)),
            f"{s.within:.0%}",
            f"{s.violation:.1%}",
            f"{s.forced:.1%}",
            f"{s.attention_worst:.1%}",
        ]
        for s in speeds
    ]
    print("\n".join(format_table(header, rows)), end="\n\n", flush=True)


def print_quality(quality: dict[str, list[Summary]]) -> None:
    """The table of schedulers."""
    print("Schedulers on 8 ranks and 128K tokens: furthest rank from the mean, mean (worst) over the batches")
    header = ("lengths", "scheduler", "tokens", "attention", "in tolerance", "shards", "tokens sent", "aligned")
    rows = [
        [
            name if index == 0 else "",
            s.scheduler,
            f"{s.token_mean:.1%} ({s.token_worst:.1%})",
            f"{s.attention_mean:.1%} ({s.attention_worst:.1%})",
            f"{s.within:.0%}",
            f"{s.shards:.1f}",
            f"{s.communication:,.0f}",
            f"{s.aligned:.0%}",
        ]
        for name, summaries in quality.items()
        for index, s in enumerate(summaries)
    ]
    print("\n".join(format_table(header, rows)), end="\n\n", flush=True)


def draw(quality: dict[str, list[Summary]], path: Path) -> None:
    """Bars of the mean imbalances and shards of every scheduler, per distribution."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter, ScalarFormatter

    figure = Figure(figsize=(11, 6.4), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    panels = (
        ("token_mean", "tokens: furthest rank from the mean", 0.10),
        ("attention_mean", "attention work: furthest rank from the mean", 0.05),
        ("shards", "shards per step", None),
    )
    schedulers = [s.scheduler for s in next(iter(quality.values()))]
    # BuddyRing stands out, the others are told apart by lightness as well as by hue.
    colours = {"buddyring": "#c8553d", "zeppelin": "#f0a202", "megatron": "#56b4e9", "uniform": "#7b8794"}
    for axes, (field, title, tolerance) in zip(figure.subplots(3, 1, sharex=True), panels, strict=True):
        width = 0.8 / len(schedulers)
        for place, scheduler in enumerate(schedulers):
            heights = [getattr(summaries[place], field) for summaries in quality.values()]
            at = np.arange(len(quality)) + (place - (len(schedulers) - 1) / 2) * width
            axes.bar(at, heights, width * 0.92, label=scheduler, color=colours.get(scheduler, "#c9d6df"))
        axes.set_yscale("log")
        axes.set_xlim(-0.6, len(quality) - 0.5)
        axes.set_title(title, fontsize=10, loc="left")
        axes.spines[["top", "right"]].set_visible(False)
        if tolerance is None:
            axes.yaxis.set_major_formatter(ScalarFormatter())
        else:
            axes.set_ylim(bottom=0.002)
            axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=None))
            axes.axhline(tolerance, color="black", linestyle=(0, (4, 3)), linewidth=1)
            axes.text(-0.58, tolerance, f"tolerance {tolerance:.0%}", va="bottom", fontsize=8)
    axes.set_xticks(range(len(quality)), list(quality))
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(schedulers), frameon=False)
    count = next(iter(quality.values()))[0].steps
    figure.suptitle(f"8 ranks, 128K tokens a step, mean of {count} steps (logarithmic scales)", fontsize=12)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def provenance(arguments: Sequence[str] | None) -> dict:
    """When, where, with what and by which command this was measured."""
    words = sys.argv[1:] if arguments is None else arguments
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "command": shlex.join(["python", "scripts/benchmark_planner.py", *words]),
        "commit": git_commit(),
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "load_average": [round(x, 2) for x in os.getloadavg()],
        "versions": {
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in ("numpy", "numba", "llvmlite")},
        },
    }


def git_commit() -> str:
    """The commit of this checkout, with ``+changes`` when the planner's files differ from it."""
    try:
        run = {"cwd": ROOT, "capture_output": True, "text": True, "check": True, "timeout": 30}
        commit = subprocess.run(["git", "rev-parse", "HEAD"], **run).stdout.strip()
        paths = ["buddyring", "scripts/benchmark_planner.py", "tests/buddyring/brute_force.py"]
        changed = subprocess.run(["git", "status", "--porcelain", "--", *paths], **run).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return commit + ("+changes" if changed else "")


def cpu_model() -> str:
    """The processor's name, where the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown"
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


if __name__ == "__main__":
    main()
