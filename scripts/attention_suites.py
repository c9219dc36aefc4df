"""What ``benchmark_attention.py`` measures: each suite gives JSON-ready rows, the same on every rank."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from attention_batches import Batch, Cell
from attention_tables import OURS, print_cells

from buddyring import Placement, plan
from megaring.kernels.checks import executors
from megaring.kernels.checks.contenders import forward_flops, fused, libraries, random_tensors
from megaring.kernels.checks.race import Alone, Contender, Race, Together, race
from megaring.kernels.checks.timing import SHAPES

CUDNN = "cudnn 1 x 32768"


@dataclass(frozen=True)
class Pass:
    """One direction. key: in a file's ``baseline_ms``. work: operations per one of a forward."""

    key: str
    work: float


FORWARD = Pass("fwd", 1.0)


def run_shapes(options: argparse.Namespace, device: torch.device, world: int) -> Iterator[list[dict]]:
    """One rank: ours and its variants beside the libraries. A row per contender, and one on the clocks, per shape."""
    end = time.monotonic() + options.seconds
    for name, lengths in SHAPES.items():
        if time.monotonic() > end:
            print(f"no time left for {name} and what follows", flush=True)
            return
        tensors = random_tensors(sum(lengths), device)
        whole = Placement.from_groups(lengths, 1, [(0, 1)] * len(lengths))
        entrants = [fused("fused", whole, tensors, options.folder), *libraries(lengths, tensors)]
        entrants += [fused(label, whole, tensors, options.folder, **more) for label, more in options.variants]
        done = race(entrants, rounds=options.rounds, device=device.index)
        yield [*({"shape": name, **row} for row in done.rows("cudnn")), {"shape": name, **done.clocks()}]
        torch.cuda.empty_cache()


def run_ranks(options: argparse.Namespace, device: torch.device, world: int) -> Iterator[list[dict]]:
    """All batches of a cell in one race with cuDNN, and of the first batch everything else. A row per contender."""
    ranks: Alone | Together = Together(None, device) if world > 1 else Alone()
    end = time.monotonic() + options.seconds
    for cell in options.cells:
        (late,) = ranks.most([float(time.monotonic() > end)])
        if late:
            if ranks.rank == 0:
                print(f"no time left for {cell.label} and what follows", flush=True)
            return
        rows = race_cell(cell, options, device, world, ranks)
        if ranks.rank == 0:
            print_cells(rows)
        yield rows
        torch.cuda.empty_cache()


def race_cell(
    cell: Cell, options: argparse.Namespace, device: torch.device, world: int, ranks: Alone | Together
) -> list[dict]:
    """One cell's rows."""
    entrants = [_cudnn(device)]
    rows: dict[str, dict] = {}
    for batch in cell.batches:
        combinations = [OURS]
        if batch is cell.batches[0] and not options.no_others:
            combinations += [("fused", other) for other in options.schedulers if other != "buddyring"]
            combinations += [(executor, each) for executor in ("ring", "gather") for each in ("buddyring", "uniform")]
        reference = None  # what the others' outputs are compared with
        for executor, scheduler in combinations:
            placement = place(batch, world, scheduler, options)
            name = f"{batch.index} {executor} {scheduler}"
            entrant, error = executors.placed(name, executor, placement, ranks.rank, device, reference)
            rows[name] = {**about(batch, executor, scheduler, placement), "gpus": world}
            if entrant is None:
                rows[name]["error"] = error
                continue
            if reference is None and len(combinations) > 1:
                reference = entrant
            entrants.append(entrant.contender)
            (difference,) = ranks.most([entrant.difference])
            rows[name] |= {"difference": difference, "wrong": difference > executors.DIFFERENCE_LIMIT}
    done = race(entrants, rounds=options.rounds, ranks=ranks, device=device.index)
    return _timed_rows(rows, done, world, options.reference)


def _timed_rows(rows: dict[str, dict], done: Race, world: int, reference: float) -> list[dict]:
    """The rows with their times; normalised ones are medians over rounds, each with cuDNN's rate in that round."""
    cudnn = done.times.get(CUDNN)
    for name, row in rows.items():
        if name not in done.times or cudnn is None:
            continue
        times = done.times[name]
        rates = [cudnn.flops / ms / 1e9 for ms in cudnn.ms]
        normal = statistics.median(ms * rate / reference for ms, rate in zip(times.ms, rates, strict=True))
        row |= {"median_ms": times.median, "rounds_ms": times.ms, "tflops": times.tflops(world)}
        row |= {"normalised_ms": normal, "normalised_tflops": times.flops / normal / 1e9 / world}
        if row["baseline_ms"] is not None:
            row["speedup"] = row["baseline_ms"] / normal
    cell = next(iter(rows.values()))["cell"]
    rate = None if cudnn is None else cudnn.tflops()
    return [*rows.values(), {"cell": cell, "cudnn_tflops": rate, **done.clocks()}]


def run_virtual(options: argparse.Namespace, device: torch.device, world: int) -> Iterator[list[dict]]:
    """Virtual ranks that share the GPU beside the same sequences whole on one rank. A row per batch."""
    end = time.monotonic() + options.seconds
    for batch in (batch for cell in options.cells for batch in cell.batches):
        if time.monotonic() > end:
            print(f"no time left for {batch.cell} and what follows", flush=True)
            return
        tensors = random_tensors(batch.tokens, device)
        placement = place(batch, options.virtual, "buddyring", options)
        whole = Placement.from_groups(batch.lengths, 1, [(0, 1)] * len(batch.lengths))
        entrants = [
            fused("virtual", placement, tensors, options.folder),
            fused("serial", whole, tensors, options.folder),
        ]
        done = race(entrants, rounds=options.rounds, device=device.index)
        row = {**about(batch, "fused", "buddyring", placement), "ranks": options.virtual}
        if len(done.times) == 2:
            virtual, serial = done.times["virtual"], done.times["serial"]
            row |= {"virtual_ms": virtual.median, "serial_ms": serial.median, "of_serial": virtual.speed(serial)}
            row |= {"tflops": virtual.tflops(), "serial_tflops": serial.tflops()}
        yield [{**row, **done.clocks()}]
        torch.cuda.empty_cache()


def place(batch: Batch, ranks: int, scheduler: str, options: argparse.Namespace) -> Placement:
    """The batch's placement, with the tolerances of the command line."""
    return plan(
        batch.lengths,
        ranks,
        scheduler=scheduler,
        token_tolerance=options.token_tolerance,
        attention_tolerance=options.attention_tolerance,
        max_group=options.max_group,
    )


def about(batch: Batch, executor: str, scheduler: str, placement: Placement, of: Pass = FORWARD) -> dict:
    """What is known of a batch and how it is run, without its time."""
    baseline = batch.baseline_ms.get(of.key)
    return {
        "cell": batch.cell,
        "source": batch.source,
        "distribution": batch.distribution,
        "tokens": batch.tokens,
        "batch": batch.index,
        "pass": of.key,
        "executor": executor,
        "scheduler": scheduler,
        "sequences": len(batch.lengths),
        "split": sum(size > 1 for _, size in placement.groups),
        "token_imbalance": placement.token_imbalance,
        "attention_imbalance": placement.attention_imbalance,
        "gflop": forward_flops(batch.lengths) * of.work / 1e9,
        "baseline_ms": baseline,
    }


def _cudnn(device: torch.device) -> Contender:
    """The yardstick of every race, on each rank by itself."""
    lengths = (32768,)
    made = libraries(lengths, random_tensors(32768, device), only=("cudnn",))[0]
    return Contender(CUDNN, made.run, made.flops)


RUN = {"shapes": run_shapes, "ranks": run_ranks, "virtual": run_virtual}
