"""Times of the fused kernels, forward and backward, beside cuDNN and FlashAttention, on one GPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from buddyring.placement import Placement
from megaring.kernels.checks.contenders import fused, libraries, random_tensors
from megaring.kernels.checks.gradient_contenders import (
    backward_libraries,
    fused_backward,
    random_gradient,
    through_autograd,
)
from megaring.kernels.checks.race import Contender, race

BASELINE = "cudnn"
ROUNDS = 14
SHAPES = {
    "1 x 8192": (8192,),
    "1 x 32768": (32768,),
    "1 x 65536": (65536,),
    "16 x 4096": (4096,) * 16,
}
HOST_LENGTHS = (256,)  # short, so that the GPU does not hold the host up
HOST_CALLS = 200

Variants = Sequence[tuple[str, Mapping[str, object]]]


def time_forward(
    folder: Path | None,
    *,
    variants: Variants = (("turns", {"ping_pong": True}), ("eager", {"slack": 0})),
    rounds: int = ROUNDS,
    seconds: float = 60.0,
) -> Iterator[dict]:
    """Four shapes: a row per contender and one of the clocks for each, then the host time of a call.

    variants: names and options of further contenders that are our kernel. seconds: for all shapes together.
    """
    yield from _time_shapes(lambda lengths: contenders(lengths, folder, variants), rounds, seconds)
    run = fused("fused", _split(HOST_LENGTHS, 1), random_tensors(sum(HOST_LENGTHS)), folder).run
    yield _host_row({"host_us": run})


def time_backward(
    folder: Path | None,
    *,
    variants: Variants = tuple((f"{heads} per task", {"heads_per_task": heads}) for heads in (1, 2, 4)),
    rounds: int = ROUNDS,
    seconds: float = 80.0,
) -> Iterator[dict]:
    """The same for the backward alone; host times of its launch, and of forward and backward through autograd."""
    yield from _time_shapes(lambda lengths: backward_contenders(lengths, folder, variants), rounds, seconds)
    placement, tokens = _split(HOST_LENGTHS, 1), sum(HOST_LENGTHS)
    tensors, gradient = random_tensors(tokens), random_gradient(tokens)
    yield _host_row(
        {
            "host_us": fused_backward("fused", placement, tensors, gradient, folder).run,
            "autograd_us": through_autograd(placement, tensors, gradient),
        }
    )


def contenders(lengths: tuple[int, ...], folder: Path | None, variants: Variants) -> list[Contender]:
    """Ours whole and split over 8 virtual ranks, its variants, and the libraries, all on the same values."""
    tensors = random_tensors(sum(lengths))
    whole, split = _split(lengths, 1), _split(lengths, 8)
    return [
        fused("fused", whole, tensors, folder),
        *libraries(lengths, tensors),
        *(fused(name, whole, tensors, folder, **options) for name, options in variants),
        fused("8 ranks", split, tensors, folder),
    ]


def backward_contenders(lengths: tuple[int, ...], folder: Path | None, variants: Variants) -> list[Contender]:
    """The same of the backward."""
    tensors, gradient = random_tensors(sum(lengths)), random_gradient(sum(lengths))
    whole, split = _split(lengths, 1), _split(lengths, 8)
    return [
        fused_backward("fused", whole, tensors, gradient, folder),
        *backward_libraries(lengths, tensors, gradient),
        *(fused_backward(name, whole, tensors, gradient, folder, **options) for name, options in variants),
        fused_backward("8 ranks", split, tensors, gradient, folder),
    ]


def _time_shapes(make: Callable[[tuple[int, ...]], list[Contender]], rounds: int, seconds: float) -> Iterator[dict]:
    torch.manual_seed(0)
    for name, lengths in SHAPES.items():
        done = race(make(lengths), rounds=rounds, seconds=seconds / len(SHAPES))
        rows = done.rows(BASELINE)
        yield from ({"shape": name, **row} for row in rows)
        yield {"shape": name, **done.clocks()}
        line = ", ".join(
            f"{row['contender']} {row['tflops']:.0f}" + (f" ({row['speed']:.3f}x)" if row["speed"] else "")
            for row in rows
        )
        rounds_run = len(done.states)
        print(f"{name:<10} TFLOP/s (x cuDNN): {line}; {rounds_run} rounds, {done.clock_range()}", flush=True)
        del done
        torch.cuda.empty_cache()


def _host_row(calls: Mapping[str, Callable[[], object]]) -> dict:
    """Host microseconds of each call, with the plan on the device."""
    row: dict = {"shape": "host"}
    for name, run in calls.items():
        for _ in range(20):
            run()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(HOST_CALLS):
            run()
        row[name] = (time.perf_counter() - start) / HOST_CALLS * 1e6
        torch.cuda.synchronize()
    print("host time per call: " + ", ".join(f"{row[name]:.0f} us ({name.removesuffix('_us')})" for name in calls))
    return row


def _split(lengths: tuple[int, ...], ranks: int) -> Placement:
    return Placement.from_groups(lengths, ranks, [(0, ranks)] * len(lengths))
