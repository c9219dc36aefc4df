"""Check and time the fused kernels, forward and backward, on one Hopper GPU.

``python scripts/check_fused.py --out results.json`` builds the kernels, checks each device layer alone, then whole
calls against fp64 on up to eight virtual ranks, CUDA graphs, large offsets, roles that pause at random, a peer that
never comes and 240 mixes of long and short sequences, does the same for gradients, and times four shapes beside cuDNN
and FlashAttention. Every stage has a limit; one that fails or hangs ends its process, and a fresh one takes the next
stage, so a sticky CUDA error does not spread. ``--stages mixes,gradient_mixes --part 2/3`` runs the second third of the
mixes;
``--stages timing --variant "turns: ping_pong=True" --variant "L2 16 MB: l2_budget=16777216"`` compares variants of
the forward in one run, ``--stages backward_timing --variant "1 head: heads_per_task=1"`` those of the backward.

Under NVIDIA's checker (racecheck or memcheck), which slows kernels down, a worker runs alone and may wait longer:

    compute-sanitizer --tool racecheck python scripts/check_fused.py --worker --stages simple --wait-seconds 60 \\
        --out progress.jsonl
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

LIMITS = {  # seconds of each stage, in their order
    "build": 40,
    "units": 15,
    "simple": 25,
    "turns": 25,
    "random": 30,
    "graph": 15,
    "offsets": 30,
    "delays": 60,
    "watchdog": 10,
    "mixes": 150,
    "gradients": 90,
    "gradient_mixes": 150,
    "timing": 90,
    "backward_timing": 120,
}
STAGES = tuple(LIMITS)
IMPORT_SECONDS = 30.0  # a fresh worker's imports may take this long, on top of a stage's limit


def main() -> int:
    """Run the stages, write the JSON and print a table; 1 when something failed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("check_fused.json"), help="where to write the results")
    parser.add_argument("--stages", default=",".join(STAGES), help=f"comma-separated, of {', '.join(STAGES)}")
    parser.add_argument("--part", type=_part, default=(1, 1), metavar="I/N", help="which part of the mixes to run")
    parser.add_argument(
        "--variant",
        action="append",
        metavar="NAME: OPTION=VALUE, ...",
        help="time our kernel with these options of its launch as well; repeatable (default: a few)",
    )
    parser.add_argument("--rounds", type=int, default=14, help="of the timing")
    parser.add_argument("--wait-seconds", type=float, default=1.0, help="bound of the waits in the simple stages")
    parser.add_argument("--total-seconds", type=float, default=560.0, help="no stage runs past this")
    parser.add_argument("--folder", type=Path, help="cache of compiled kernels (default: the user's)")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    stages = options.stages.split(",")
    if unknown := set(stages) - set(STAGES):
        parser.error(f"unknown stages {sorted(unknown)}; choose from {', '.join(STAGES)}")
    if options.worker:
        _work(stages, options)
        return 0
    end = time.monotonic() + options.total_seconds
    results: dict[str, dict] = {stage: {"rows": [], "seconds": 0.0, "note": "not run"} for stage in stages}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    while stages and time.monotonic() < end:
        stages = _supervise(stages, end, options, results)
        _save(options.out, results)
    print(f"\n{'stage':<15} {'passed':>7} {'failed':>7} {'seconds':>8}  note")
    bad = False
    for stage, result in results.items():
        failed = sum(not row.get("passed", True) for row in result["rows"])
        bad |= bool(failed or result["note"])
        passed = len(result["rows"]) - failed
        print(f"{stage:<15} {passed:>7} {failed:>7} {result['seconds']:>8.1f}  {result['note']}")
    return int(bad)


def _supervise(stages: list[str], end: float, options: argparse.Namespace, results: dict[str, dict]) -> list[str]:
    """Run stages in one worker until one fails or runs out of time; returns those that are still to be run.

    The worker tells how far it is in a file of JSON lines, so whatever it wrote before it ended is kept.
    """
    progress = options.out.with_name(f"{options.out.stem}.progress")
    progress.write_text("")
    command = [sys.executable, "-u", str(Path(__file__).resolve()), "--worker", "--stages", ",".join(stages)]
    command += ["--out", str(progress), "--part", "{}/{}".format(*options.part)]
    command += ["--wait-seconds", str(options.wait_seconds), "--rounds", str(options.rounds)]
    for variant in options.variant or ():
        command += ["--variant", variant]
    command += ["--folder", str(options.folder)] if options.folder else []
    errors = progress.with_suffix(".errors")
    with open(errors, "w") as file:
        worker = subprocess.Popen(command, stderr=file)
    current, started, position, note = stages[0], time.monotonic(), 0, ""
    while True:
        ended = worker.poll() is not None
        text = progress.read_text()
        whole = text.rfind("\n") + 1
        for line in text[position:whole].splitlines():
            message = json.loads(line)
            if "row" in message:
                results[message["stage"]]["rows"].append(message["row"])
                continue
            current, started = message["stage"], time.monotonic()
            if "seconds" in message:
                results[current].update(seconds=message["seconds"], note="")
                stages = stages[1:]
        position = whole
        if ended or not stages:
            break
        now = time.monotonic()
        if now > min(started + LIMITS[current] + IMPORT_SECONDS, end):
            worker.kill()
            note = f"stopped after {now - started:.0f} s"
        time.sleep(0.05)
    worker.wait()
    last_words = " | ".join(errors.read_text().strip().splitlines()[-3:])[-500:]
    progress.unlink()
    errors.unlink()
    if not stages:
        return []
    note = note or f"exit {worker.returncode}: {last_words}"
    print(f"   {stages[0]}: {note}", flush=True)
    results[stages[0]].update(seconds=time.monotonic() - started, note=note)
    return stages[1:]


def _save(path: Path, results: dict[str, dict]) -> None:
    path.write_text(
        json.dumps(
            {
                "date": datetime.now(UTC).isoformat(timespec="seconds"),
                "command": " ".join(sys.argv),
                "machine": platform.node(),
                **next((row for row in results.get("build", {}).get("rows", []) if "gpu" in row), {}),
                "stages": results,
            },
            indent=1,
        )
    )


def _part(text: str) -> tuple[int, int]:
    """``2/3`` as (2, 3)."""
    match = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", text)
    if match is None or int(match[1]) > int(match[2]):
        raise argparse.ArgumentTypeError(f"{text!r} is no part such as 1/3, 2/3 or 3/3")
    return int(match[1]), int(match[2])


def _work(stages: list[str], options: argparse.Namespace) -> None:
    """The worker: runs stages one after another and appends to ``options.out`` what it finds."""
    # Here and not above, so that only workers touch the GPU.
    from megaring.kernels.checks import robust
    from megaring.kernels.checks import stages as checks
    from megaring.kernels.checks.backward import check_gradients
    from megaring.kernels.checks.contenders import parse_variant
    from megaring.kernels.checks.gradient_mixes import check_gradient_mixes
    from megaring.kernels.checks.mixes import check_mixes
    from megaring.kernels.checks.timing import time_backward, time_forward

    timing = {"rounds": options.rounds}
    if options.variant:
        timing["variants"] = [parse_variant(text) for text in options.variant]
    run: dict[str, Callable[[Path | None], Iterator[dict]]] = {
        "build": checks.check_build,
        "units": checks.check_units,
        "simple": partial(checks.check_simple, timeout_s=options.wait_seconds),
        "turns": checks.check_turns,
        "random": checks.check_random,
        "graph": robust.check_graph,
        "offsets": robust.check_offsets,
        "delays": robust.check_delays,
        "watchdog": checks.check_watchdog,
        "mixes": partial(check_mixes, part=options.part),
        "gradients": partial(check_gradients, timeout_s=options.wait_seconds),
        "gradient_mixes": partial(check_gradient_mixes, part=options.part),
        "timing": partial(time_forward, **timing),
        "backward_timing": partial(time_backward, **timing),
    }
    with open(options.out, "a") as file:

        def tell(**message: object) -> None:
            file.write(json.dumps(message) + "\n")
            file.flush()

        for stage in stages:
            print(f"== {stage}", flush=True)
            start = time.monotonic()
            tell(stage=stage)
            for row in run[stage](options.folder):
                tell(stage=stage, row=row)
            tell(stage=stage, seconds=time.monotonic() - start)


if __name__ == "__main__":
    sys.exit(main())
