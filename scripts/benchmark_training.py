"""Train the same samples under several schedulers and on one GPU, and compare losses and tokens/s.

python scripts/benchmark_training.py --gpus 2 --output docs/results/training.json

Lengths are FreeLaw- and GitHub-like (``buddyring.distributions``), the text is the standard library's bytes. A run is
``scripts/pretrain_gpt.py`` under torchrun; options after ``--`` go to all of them. One GPU sees the same microbatches,
so losses must agree within ``--tolerance`` (relative, bf16). Prints a line per run and writes it to the JSON file as
the run ends, so that a later one may fail or be cut off; ``--resume`` then runs only what the file lacks. On a machine
without GPUs, ``--gpus`` counts CPU processes.
"""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from bounded_run import run_bounded
from training_results import Results, ResultsError, Row, Settings, this_machine

from buddyring.distributions import NAMES, batch, stdlib_files
from megaring.data.indexed import IndexedWriter
from megaring.options import CP_SCHEDULERS

ROOT = Path(__file__).resolve().parents[1]
WARM_UP = 3  # steps left out of the speed
BYTES = 257  # ids that the text uses
COLLECTIVE_MINUTES = 3  # ranks that wait for each other longer end with the name of what they wait for


@dataclass(frozen=True)
class Run:
    """One run to make: lengths and scheduler by name, and the number of ranks."""

    lengths: str
    gpus: int
    scheduler: str

    @property
    def key(self) -> tuple[str, int, str]:
        """What tells runs of the same settings apart."""
        return self.lengths, self.gpus, self.scheduler


def main(arguments: Sequence[str] | None = None) -> int:
    """Run everything, print and write each run as it ends; 1 when a run failed or a loss is off, 2 for bad options."""
    options = parse(arguments)
    try:
        machine, gpus = this_machine()
        if 0 < gpus < options.gpus:
            raise ResultsError(f"--gpus {options.gpus}: this machine has {gpus}")
        settings = Settings(options.recipe, options.steps, options.token_budget, tuple(options.extra), machine)
        command = shlex.join(["python", "scripts/benchmark_training.py", *(arguments or sys.argv[1:])])
        results = Results.open(options.output, settings, command, resume=options.resume)
    except ResultsError as error:
        print(f"benchmark_training.py: error: {error}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        for name in options.lengths:
            corpus = make_corpus(Path(folder) / name, name, options.token_budget, options.steps)
            for run in runs_of(name, options.gpus, options.schedulers):
                kept = results.finished(*run.key)
                row = compared(kept or train(options, corpus, run, Path(folder)), results)
                results.add(row)
                print(describe(row) + (" (kept)" if kept else ""), flush=True)
    return int(any(row.error or (row.loss_difference or 0) > options.tolerance for row in results.rows))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--gpus", type=int, default=2, help="ranks beside the runs on one; default: 2")
    parser.add_argument("--recipe", default="recipes/qwen3_30b_a3b_4layers.yaml", help="default: %(default)s")
    parser.add_argument("--lengths", nargs="+", choices=NAMES, default=["freelaw", "github"])
    parser.add_argument("--schedulers", nargs="+", choices=CP_SCHEDULERS, default=["buddyring", "megatron", "uniform"])
    parser.add_argument("--steps", type=int, default=20, help=f"the first {WARM_UP} are not timed; default: 20")
    parser.add_argument("--token-budget", type=int, default=32768)
    parser.add_argument("--tolerance", type=float, default=0.02, help="largest relative difference of a step's loss")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for one run; default: 600")
    parser.add_argument("--output", type=Path, default=Path("training.json"), help="default: training.json")
    parser.add_argument("--resume", action="store_true", help="keep the good runs in --output and make the others")
    parser.add_argument("extra", nargs="*", help="after --: options for every run")
    options = parser.parse_args(arguments)
    if options.gpus < 1 or options.steps <= WARM_UP or options.token_budget < 1:
        parser.error(f"--gpus and --token-budget must be at least 1, --steps at least {WARM_UP + 1}")
    return options


def runs_of(lengths: str, gpus: int, schedulers: Sequence[str]) -> list[Run]:
    """One rank first, which the others are compared with; then every scheduler."""
    return [Run(lengths, 1, "buddyring")] + [Run(lengths, gpus, each) for each in schedulers if gpus > 1]


def make_corpus(prefix: Path, name: str, tokens: int, batches: int) -> Path:
    """Documents with the lengths of ``name``, cut from the standard library's files; enough for every step."""
    text = b"".join(path.read_bytes() for path in stdlib_files()[:200])
    ids, at = np.frombuffer(text, dtype=np.uint8), 0
    with IndexedWriter(prefix, BYTES) as writer:
        for index in range(batches + 1):
            for length in batch(name, tokens, index=index):
                take = (np.arange(length) + at) % len(ids)
                writer.add(ids[take])
                at += int(length)
        writer.commit()
    return prefix


def train(options: argparse.Namespace, corpus: Path, run: Run, folder: Path) -> Row:
    """One run of the training script."""
    out = folder / f"{run.lengths}_{run.gpus}_{run.scheduler}"
    error = run_bounded(command_of(options, corpus, run, out), folder / f"{out.name}.log", options.timeout)
    metrics = out / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    steps = [line for line in lines if line["kind"] == "train"]
    if not error and len(steps) < options.steps:
        error = f"it ended well, but recorded {len(steps)} of {options.steps} steps"
    return row_of(run, steps, error)


def command_of(options: argparse.Namespace, corpus: Path, run: Run, out: Path) -> list[str]:
    """The command line of one run."""
    recipe = options.recipe if Path(options.recipe).exists() else ROOT / options.recipe
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={run.gpus}"]
    command += [str(ROOT / "scripts" / "pretrain_gpt.py"), "--recipe", str(recipe), "--data-path", str(corpus)]
    command += ["--output-dir", str(out), "--cp-scheduler", run.scheduler, "--token-budget", str(options.token_budget)]
    command += ["--seq-length", str(options.token_budget), "--train-iters", str(options.steps), "--no-save-last"]
    command += ["--context-parallel-size", str(run.gpus), "--expert-model-parallel-size", str(run.gpus)]
    return [*command, "--distributed-timeout-minutes", str(COLLECTIVE_MINUTES), *options.extra]


def row_of(run: Run, steps: Sequence[dict], error: str | None) -> Row:
    """What the metrics of a run's training steps say. steps: one mapping each, as the JSON lines have it."""
    losses = tuple(line["loss"] for line in steps)

    def median(key: str) -> float | None:
        values = [line[key] for line in steps[WARM_UP:] if line[key] is not None]
        return statistics.median(values) if values else None

    return Row(
        lengths=run.lengths,
        gpus=run.gpus,
        scheduler=run.scheduler,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        steps=len(steps),
        tokens_per_s=median("tokens_per_s"),
        step_s=median("step_s"),
        mfu=median("mfu"),
        memory_gib=max((line["memory_gib"] or 0.0 for line in steps), default=None),
        token_imbalance=median("token_imbalance"),
        attention_imbalance=median("attention_imbalance"),
        first_loss=losses[0] if losses else None,
        last_loss=losses[-1] if losses else None,
        loss_difference=None,
        losses=losses,
        error=error,
    )


def compared(row: Row, results: Results) -> Row:
    """``row`` with its difference to the run of the same lengths on one rank, if that has ended well."""
    baseline = results.finished(row.lengths, 1, "buddyring")
    if row.gpus == 1 or baseline is None:
        return row
    pairs = zip(row.losses, baseline.losses, strict=False)  # a run that failed has fewer
    return replace(row, loss_difference=max((abs(a - b) / b for a, b in pairs), default=None))


def describe(row: Row) -> str:
    """One line of the table."""
    where = f"{row.lengths:<8} {row.gpus} GPU {row.scheduler:<10}"
    if row.error:
        return f"{where} failed after {row.steps} steps: {row.error}"
    off = "" if row.loss_difference is None else f" | loss off by {row.loss_difference:.2%} at most"
    mfu = "" if row.mfu is None else f" | MFU {row.mfu:.1%}"
    return (
        f"{where} | {row.tokens_per_s:>9,.0f} tokens/s{mfu} | "
        f"imbalance {row.token_imbalance:.1%} / {row.attention_imbalance:.1%} | "
        f"loss {row.first_loss:.3f} -> {row.last_loss:.3f}{off}"
    )


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an exit that ends the current run's processes
    sys.exit(main())
