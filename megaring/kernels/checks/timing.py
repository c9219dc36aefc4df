"""Times of the fused forward beside cuDNN and FlashAttention, on one GPU."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from buddyring.placement import Placement
from megaring.kernels.checks.contenders import fused, libraries, random_tensors
from megaring.kernels.checks.race import Contender, race

BASELINE = "cudnn"
ROUNDS = 14
SHAPES = {
    "1 x 8192": (8192,),
    "1 x 32768": (32768,),
    "1 x 65536": (65536,),
    "16 x 4096": (4096,) * 16,
}

Variants = Sequence[tuple[str, Mapping[str, object]]]


def time_forward(
    folder: Path | None,
    *,
    variants: Variants = (("no turns", {"ping_pong": False}),),
    rounds: int = ROUNDS,
    seconds: float = 60.0,
) -> Iterator[dict]:
    """Four shapes: a row per contender and one of the clocks for each, then the host time of a call.

    variants: names and options of further contenders that are our kernel. seconds: for all shapes together.
    """
    torch.manual_seed(0)
    for name, lengths in SHAPES.items():
        done = race(contenders(lengths, folder, variants), rounds=rounds, seconds=seconds / len(SHAPES))
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
    yield _host_time(folder)


def contenders(lengths: tuple[int, ...], folder: Path | None, variants: Variants) -> list[Contender]:
    """Ours whole and split over 8 virtual ranks, its variants, and the libraries, all on the same values."""
    tensors = random_tensors(sum(lengths))
    whole, split = (Placement.from_groups(lengths, n, [(0, n)] * len(lengths)) for n in (1, 8))
    return [
        fused("fused", whole, tensors, folder),
        *libraries(lengths, tensors),
        *(fused(name, whole, tensors, folder, **options) for name, options in variants),
        fused("8 ranks", split, tensors, folder),
    ]


def _host_time(folder: Path | None) -> dict:
    """Host microseconds of one call, with the plan on the device."""
    lengths = (256,)
    run = fused("fused", Placement.from_groups(lengths, 1, [(0, 1)]), random_tensors(256), folder).run
    for _ in range(20):
        run()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(200):
        run()
    host = (time.perf_counter() - start) / 200 * 1e6
    torch.cuda.synchronize()
    print(f"host time per call: {host:.0f} us")
    return {"shape": "host", "host_us": host}
