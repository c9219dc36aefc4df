"""Train the same samples under several schedulers and on one GPU, and compare losses and tokens/s.

python scripts/benchmark_training.py --gpus 2 --output docs/results/training.json

Lengths are FreeLaw- and GitHub-like (``buddyring.distributions``), the text is the standard library's bytes. A run is
``scripts/pretrain_gpt.py`` under torchrun; options after ``--`` go to all of them. One GPU sees the same microbatches,
so losses must agree within ``--tolerance`` (relative, bf16). Prints a table and writes it as JSON.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from buddyring.distributions import batch, stdlib_files
from megaring.data.indexed import IndexedWriter

ROOT = Path(__file__).resolve().parents[1]
WARM_UP = 3  # steps left out of the speed
BYTES = 257  # ids that the text uses


@dataclass(frozen=True)
class Row:
    """One run. speeds are medians over the steps after the warm-up; ``loss_difference`` is to the one-GPU run."""

    lengths: str
    gpus: int
    scheduler: str
    steps: int
    tokens_per_s: float | None
    step_s: float | None
    mfu: float | None
    memory_gib: float | None
    token_imbalance: float | None
    attention_imbalance: float | None
    first_loss: float | None
    last_loss: float | None
    loss_difference: float | None
    error: str | None


def main() -> int:
    """Run everything, print, write; 1 when a run failed or a loss is off."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--recipe", default=str(ROOT / "recipes" / "qwen3_30b_a3b_4layers.yaml"))
    parser.add_argument("--lengths", nargs="+", default=["freelaw", "github"])
    parser.add_argument("--schedulers", nargs="+", default=["buddyring", "megatron", "uniform"])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--token-budget", type=int, default=32768)
    parser.add_argument("--tolerance", type=float, default=0.02, help="largest relative difference of a step's loss")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for one run")
    parser.add_argument("--output", type=Path, default=Path("training.json"))
    parser.add_argument("extra", nargs="*", help="after --: options for every run")
    options = parser.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in options.lengths:
            corpus = make_corpus(Path(folder) / name, name, options.token_budget, options.steps)
            runs = [(1, "buddyring")] + [(options.gpus, s) for s in options.schedulers if options.gpus > 1]
            baseline: list[float] = []
            for gpus, scheduler in runs:
                row, losses = train(options, corpus, name, gpus, scheduler, baseline, Path(folder))
                baseline = baseline or losses
                rows.append(row)
                print(describe(row), flush=True)
    write(options.output, rows)
    bad = [row for row in rows if row.error or (row.loss_difference or 0) > options.tolerance]
    return int(bool(bad))


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


def train(
    options: argparse.Namespace,
    corpus: Path,
    lengths: str,
    gpus: int,
    scheduler: str,
    baseline: list[float],
    folder: Path,
) -> tuple[Row, list[float]]:
    """One run of the training script; its row and the loss of every step."""
    out = folder / f"{lengths}_{gpus}_{scheduler}"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={gpus}"]
    command += [str(ROOT / "scripts" / "pretrain_gpt.py"), "--recipe", options.recipe, "--data-path", str(corpus)]
    command += ["--output-dir", str(out), "--cp-scheduler", scheduler, "--token-budget", str(options.token_budget)]
    command += ["--seq-length", str(options.token_budget), "--train-iters", str(options.steps), "--no-save-last"]
    command += ["--expert-model-parallel-size", str(gpus), *options.extra]
    error = None
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=options.timeout)
        if done.returncode:
            error = "\n".join((done.stdout + done.stderr).splitlines()[-12:])
    except subprocess.TimeoutExpired:
        error = f"no end within {options.timeout:g} s"
    metrics = out / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    steps = [line for line in lines if line["kind"] == "train"]
    losses = [line["loss"] for line in steps]
    timed = steps[WARM_UP:]

    def median(key: str) -> float | None:
        values = [line[key] for line in timed if line[key] is not None]
        return statistics.median(values) if values else None

    differences = [abs(a - b) / b for a, b in zip(losses, baseline, strict=False)]
    row = Row(
        lengths=lengths,
        gpus=gpus,
        scheduler=scheduler,
        steps=len(steps),
        tokens_per_s=median("tokens_per_s"),
        step_s=median("step_s"),
        mfu=median("mfu"),
        memory_gib=max((line["memory_gib"] or 0.0 for line in steps), default=None),
        token_imbalance=median("token_imbalance"),
        attention_imbalance=median("attention_imbalance"),
        first_loss=losses[0] if losses else None,
        last_loss=losses[-1] if losses else None,
        loss_difference=max(differences, default=None),
        error=error,
    )
    return row, losses


def describe(row: Row) -> str:
    """One line of the table."""
    if row.error:
        return f"{row.lengths:<8} {row.gpus} GPU {row.scheduler:<10} failed after {row.steps} steps: {row.error}"
    off = "" if row.loss_difference is None else f" | loss off by {row.loss_difference:.2%} at most"
    mfu = "" if row.mfu is None else f" | MFU {row.mfu:.1%}"
    return (
        f"{row.lengths:<8} {row.gpus} GPU {row.scheduler:<10} | {row.tokens_per_s or 0:>9,.0f} tokens/s{mfu} | "
        f"imbalance {row.token_imbalance or 0:.1%} / {row.attention_imbalance or 0:.1%} | "
        f"loss {row.first_loss:.3f} -> {row.last_loss:.3f}{off}"
    )


def write(path: Path, rows: list[Row]) -> None:
    """The rows with date, machine, versions and command."""
    import torch

    versions = {"torch": torch.__version__, "python": platform.python_version()}
    versions["megatron-core"] = importlib.metadata.version("megatron-core")
    data = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "versions": versions,
        "command": shlex.join(["python", *sys.argv]),
        "rows": [asdict(row) for row in rows],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
