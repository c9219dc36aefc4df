"""``megaring build``: compile every kernel ahead of its first use, and show what the compiler made of it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from megaring.kernels.compile import Built, CompileError, build
from megaring.kernels.specialisations import every_specialisation

DESCRIPTION = "Compile every GPU kernel ahead of its first use. Needs neither a GPU nor a compiler on this machine."


def build_all(folder: Path | None = None, workers: int = 2) -> list[Built]:
    """Compile all specialisations, ``workers`` at a time. Raises what ``megaring.kernels.compile.build`` raises."""
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(lambda each: build(each, folder=folder), every_specialisation()))


def faults(built: Built) -> list[str]:
    """Why a build is not good enough to ship: spills, registers over budget, notes on serialised products."""
    report, budget = built.report, built.specialisation.registers
    found = []
    if report.spill_stores or report.spill_loads:
        found.append(f"spills {report.spill_stores} bytes out and {report.spill_loads} in")
    if report.registers > budget:
        found.append(f"uses {report.registers} registers, {budget} are budgeted")
    return [*found, *report.notes]


def table(builds: Sequence[Built]) -> str:
    """One line per build."""
    lines = [f"{'registers':>9} {'spills':>7} {'shared':>8} {'cubin':>8} {'time':>7}  kernel"]
    for built in builds:
        report, time = built.report, "cached" if built.cached else f"{built.seconds:.1f} s"
        lines.append(
            f"{report.registers:>9} {report.spill_stores + report.spill_loads:>7} "
            f"{built.specialisation.shared_bytes:>8} {len(built.cubin):>8} {time:>7}  {built.specialisation.label}"
        )
        lines += [f"{'':>9} {fault}" for fault in faults(built)]
    return "\n".join(lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that ``run`` reads."""
    parser.add_argument("--folder", type=Path, help="where to keep the compiled kernels (default: the user's cache)")
    parser.add_argument("--workers", type=int, default=2, help="compilations at a time")


def main(arguments: Sequence[str] | None = None) -> int:
    """``python -m megaring.build``: the same as ``megaring build``."""
    parser = argparse.ArgumentParser(prog="megaring build", description=DESCRIPTION, allow_abbrev=False)
    add_arguments(parser)
    return run(parser.parse_args(arguments))


def run(options: argparse.Namespace) -> int:
    """Build, print the table, and return 1 when something is not good enough."""
    try:
        builds = build_all(options.folder, options.workers)
    except (CompileError, TimeoutError) as error:
        print(error, file=sys.stderr)
        return 1
    print(table(builds))
    return int(any(faults(built) for built in builds))


if __name__ == "__main__":
    sys.exit(main())
