"""What ``benchmark_attention.py`` measures: each suite gives JSON-ready rows, the same on every rank."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from attention_batches import Batch, Cell
from attention_tables import OURS, print_cells

from buddyring import Placement, plan
from megaring.kernels.checks import executors
from megaring.kernels.checks.contenders import Tensors, forward_flops, fused, libraries, random_tensors
from megaring.kernels.checks.gradient_contenders import backward_libraries, fused_backward, random_gradient
from megaring.kernels.checks.race import Alone, Contender, Race, Together, race
from megaring.kernels.checks.timing import SHAPES

CUDNN = "cudnn 1 x 32768"


@dataclass(frozen=True)
class Pass:
    """One direction. key: in a file's ``baseline_ms``. work: operations per one of a forward.

    reference: TFLOP/s of cuDNN at 1 x 32768 on the machine to which times are normalised. difference: the largest
    between two executors.
    """

    key: str
    work: float
    reference: float
    difference: float

    @property
    def backward(self) -> bool:
        """Whether it differentiates."""
        return self.work != 1.0


FORWARD = Pass("fwd", 1.0, 589.0, executors.DIFFERENCE_LIMIT)
BACKWARD = Pass("bwd", 2.5, 530.0, executors.GRADIENT_DIFFERENCE_LIMIT)
PASSES = {each.key: each for each in (FORWARD, BACKWARD)}


class Values:
    """The inputs of a race on one GPU, and its contenders in the direction of the command line."""

    def __init__(self, tokens: int, device: torch.device, options: argparse.Namespace):
        self._tensors: Tensors = random_tensors(tokens, device)
        self._gradient = random_gradient(tokens, device) if PASSES[options.direction].backward else None
        self._folder = options.folder

    def ours(self, name: str, placement: Placement, **options) -> Contender:
        """Our kernel, with these options of its launch."""
        if self._gradient is None:
            return fused(name, placement, self._tensors, self._folder, **options)
        return fused_backward(name, placement, self._tensors, self._gradient, self._folder, **options)

    def libraries(self, lengths: tuple[int, ...], only: Sequence[str] = ("cudnn", "fa2", "fa3")) -> list[Contender]:
        """Those of ``only`` that run here, on equal ``lengths``."""
        if self._gradient is None:
            return libraries(lengths, self._tensors, only)
        return backward_libraries(lengths, self._tensors, self._gradient, only)


def run_shapes(options: argparse.Namespace, device: torch.device, world: int) -> Iterator[list[dict]]:
    """One rank: ours and its variants beside the libraries. A row per contender, and one on the clocks, per shape."""
    end = time.monotonic() + options.seconds
    for name, lengths in SHAPES.items():
        if time.monotonic() > end:
            print(f"no time left for {name} and what follows", flush=True)
            return
        values = Values(sum(lengths), device, options)
        whole = Placement.from_groups(lengths, 1, [(0, 1)] * len(lengths))
        entrants = [values.ours("fused", whole), *values.libraries(lengths)]
        entrants += [values.ours(label, whole, **more) for label, more in options.variants]
        done = race(entrants, rounds=options.rounds, device=device.index)
        about = {"shape": name, "pass": options.direction}
        yield [*({**about, **row} for row in done.rows("cudnn")), {**about, **done.clocks()}]
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
    of = PASSES[options.direction]
    entrants = _cudnn(device, options)
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
            entrant, error = executors.placed(
                name, executor, placement, ranks.rank, device, reference, backward=of.backward
            )
            rows[name] = {**about(batch, executor, scheduler, placement, of), "gpus": world}
            if entrant is None:
                rows[name]["error"] = error
                continue
            if reference is None and len(combinations) > 1:
                reference = entrant
            entrants.append(entrant.contender)
            (difference,) = ranks.most([entrant.difference])
            rows[name] |= {"difference": difference, "wrong": difference > of.difference}
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
        values = Values(batch.tokens, device, options)
        placement = place(batch, options.virtual, "buddyring", options)
        whole = Placement.from_groups(batch.lengths, 1, [(0, 1)] * len(batch.lengths))
        entrants = [values.ours("virtual", placement), values.ours("serial", whole)]
        done = race(entrants, rounds=options.rounds, device=device.index)
        of = PASSES[options.direction]
        row = {**about(batch, "fused", "buddyring", placement, of), "ranks": options.virtual}
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


def _cudnn(device: torch.device, options: argparse.Namespace) -> list[Contender]:
    """The yardstick of every race, on each rank by itself."""
    lengths = (32768,)
    found = Values(sum(lengths), device, options).libraries(lengths, only=("cudnn",))
    return [Contender(CUDNN, made.run, made.flops) for made in found]


RUN = {"shapes": run_shapes, "ranks": run_ranks, "virtual": run_virtual}
