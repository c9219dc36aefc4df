"""Core attention: the fused kernel beside libraries, other executors and other schedulers, in one run.

One GPU, four shapes of equal lengths, beside cuDNN and FlashAttention:

    python scripts/benchmark_attention.py shapes --output shapes.json --plot shapes.png

Several GPUs of one node, batches of different lengths placed by BuddyRing, beside ``ring`` and gather-everything over
NCCL and the other schedulers on the first batch of every cell (a distribution and a number of tokens):

    torchrun --standalone --nproc-per-node=2 scripts/benchmark_attention.py ranks --batches FILE.json --own 2 \
        --output ranks.json --plot ranks.png

One GPU carrying eight virtual ranks, beside the same sequences whole on one rank:

    python scripts/benchmark_attention.py virtual --virtual 8 --output virtual.json

``--pass bwd`` measures the backward alone, by the same contenders, of an output that each has made before.

Times are those of the slowest rank, the handshake included, the median over rounds in which all contenders of a cell
take turns. Machines and clocks differ, so times are also given as on a machine whose cuDNN reaches ``--reference``
TFLOP/s at 1 x 32768, by cuDNN's rate in the same round.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from attention_batches import BatchesError, cells, own_batches, read_batches
from attention_plot import draw
from attention_suites import PASSES, RUN
from attention_tables import PRINT

from buddyring import SCHEDULERS
from buddyring.distributions import NAMES
from megaring.backends.local import choose_kernel
from megaring.kernels.checks.contenders import parse_variant
from megaring.kernels.checks.gpu_state import driver_version

ROOT = Path(__file__).resolve().parent.parent
COLLECTIVE_SECONDS = 180.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write; 1 when an executor's result is wrong."""
    options = parse(arguments)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1 and options.suite != "ranks":
        sys.exit(f"{options.suite} measures one GPU; start it without torchrun")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    if world > 1:
        dist.init_process_group("nccl", device_id=device, timeout=timedelta(seconds=COLLECTIVE_SECONDS))
    rank = int(os.environ.get("RANK", "0"))
    torch.manual_seed(1234 + rank)
    begin = time.monotonic()
    try:
        rows: list[dict] = []
        about = provenance(options, device, world)
        for more in RUN[options.suite](options, device, world):
            rows += more
            if rank == 0 and options.output is not None:  # every time, so that nothing is lost with what fails later
                write(options.output, {**about, "seconds": round(time.monotonic() - begin, 1), "rows": rows})
        if rank == 0:
            PRINT[options.suite](rows)
            if options.plot is not None:
                draw(options.suite, rows, options.plot)
        return int(any(row.get("wrong", False) for row in rows))
    finally:
        if world > 1:
            dist.destroy_process_group()


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--output", type=Path, metavar="FILE.json", help="where to write the numbers; default: nowhere")
    common.add_argument("--plot", type=Path, metavar="FILE.png", help="draw them")
    common.add_argument(
        "--pass",
        dest="direction",
        choices=list(PASSES),
        default="fwd",
        help="the forward, or the backward alone; default: fwd",
    )
    common.add_argument("--rounds", type=int, default=6, help="rounds of every race; default: 6")
    common.add_argument("--seconds", type=float, default=540.0, help="no race begins after this; default: 540")
    common.add_argument(
        "--reference",
        type=float,
        help="cuDNN's TFLOP/s to normalise to; default: "
        + ", ".join(f"{each.reference:.0f} ({key})" for key, each in PASSES.items()),
    )
    common.add_argument("--folder", type=Path, help="cache of compiled kernels (default: the user's)")
    placing = argparse.ArgumentParser(add_help=False)
    placing.add_argument("--batches", type=Path, metavar="FILE.json", help="batches with their baselines")
    placing.add_argument("--own", type=int, default=0, metavar="N", help="unrounded batches of each cell; default: 0")
    placing.add_argument("--distributions", nargs="+", default=[], choices=NAMES, help="only these")
    placing.add_argument("--tokens", nargs="+", type=int, default=[32768, 65536, 131072], help="tokens of a batch")
    placing.add_argument("--token-tolerance", type=float, default=0.10, help="of the placement; default: 0.10")
    placing.add_argument("--attention-tolerance", type=float, default=0.02, help="of the placement; default: 0.02")
    placing.add_argument("--max-group", type=int, default=8, help="ranks that share a sequence; default: 8")
    suites = parser.add_subparsers(dest="suite", required=True)
    shapes = suites.add_parser("shapes", parents=[common], help="equal lengths on one GPU")
    shapes.add_argument("--variant", action="append", default=[], metavar="NAME: OPTION=VALUE, ...")
    ranks = suites.add_parser("ranks", parents=[common, placing], help="batches on the GPUs of a node, under torchrun")
    ranks.add_argument("--schedulers", nargs="*", default=list(SCHEDULERS), choices=SCHEDULERS, help="to compare")
    ranks.add_argument("--no-others", action="store_true", help="only fused with BuddyRing, no other executors")
    virtual = suites.add_parser("virtual", parents=[common, placing], help="virtual ranks on one GPU")
    virtual.add_argument("--virtual", type=int, default=8, choices=(2, 4, 8), help="virtual ranks; default: 8")
    options = parser.parse_args(arguments)
    if options.reference is None:
        options.reference = PASSES[options.direction].reference
    if options.rounds < 2:
        parser.error("--rounds must be at least 2")
    if options.suite != "shapes":
        if options.batches is None and options.own < 1:
            parser.error("nothing to measure: give --batches FILE.json, --own N, or both")
        try:
            given = [] if options.batches is None else read_batches(options.batches)
        except BatchesError as error:
            parser.error(str(error))
        options.cells = cells(
            [*given, *own_batches(options.tokens, options.own)], options.distributions, options.tokens
        )
        if not options.cells:
            parser.error("no batch is left: --distributions and --tokens select none")
    else:
        try:
            options.variants = [parse_variant(text) for text in options.variant]
        except ValueError as error:
            parser.error(f"--variant: {error}")
    return options


def provenance(options: argparse.Namespace, device: torch.device, world: int) -> dict[str, Any]:
    """When, where, with what and with which settings this was measured."""
    settings = {key: _plain(value) for key, value in vars(options).items() if key != "cells"}
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", *sys.argv]),
        "commit": git_commit(),
        "settings": settings,
        "heads": "32 query and 8 KV heads, D = 128, bf16, causal",
        "gpus": [torch.cuda.get_device_name(device)] * world,
        "local_kernel": choose_kernel(device, torch.bfloat16, 128).NAME,
        "versions": {
            "driver": driver_version(),
            "torch": torch.__version__,
            "cudnn": torch.backends.cudnn.version(),
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
            "python": platform.python_version(),
        },
    }


def git_commit() -> str:
    """The commit of this checkout, with ``+changes`` when the measured files differ from it."""
    try:
        run = {"cwd": ROOT, "capture_output": True, "text": True, "check": True, "timeout": 30}
        commit = subprocess.run(["git", "rev-parse", "HEAD"], **run).stdout.strip()
        changed = subprocess.run(["git", "status", "--porcelain", "--", "megaring", "buddyring", "scripts"], **run)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return commit + ("+changes" if changed.stdout.strip() else "")


def write(path: Path, record: dict[str, Any]) -> None:
    """The record as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    return value


if __name__ == "__main__":
    sys.exit(main())
