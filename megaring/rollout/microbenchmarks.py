"""Measure the rates of the cost model on the ranks of a worker: a second or two, once per machine."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from megaring.rollout.calibration import Calibration, load, measure, save
from megaring.rollout.runner import Runner
from megaring.rollout.step import Chunk, StepPlan

_TURNS = 5  # of every benchmark; the fastest counts
_ROWS, _SIDE = 512, 1024  # of a projection
_HEADS, _WIDTH, _TOKENS, _CACHED = 8, 64, 512, 8192  # of attention
_MESSAGE = 1 << 20  # elements that a rank sends


def calibrate(runner: Runner, path: Path | None = None) -> Calibration:
    """The calibration of this machine: the one that is kept at rank 0's ``path``, else measured and kept; collective.

    ``runner`` is idle; step overhead is the time of its step of a single row.
    """
    ranks, device, dtype = runner.ranks, runner.decoder.device, runner.decoder.dtype
    machine = f"{_device_name(device)}, {ranks.size} ranks, {str(dtype).removeprefix('torch.')}"
    known = ranks.broadcast(load(machine, path) if ranks.rank == 0 else None)
    if known is None:
        known = ranks.broadcast(measure(machine, _benchmarks(runner, device, dtype)))
        if ranks.rank == 0:
            save(known, path)
    return known


def _benchmarks(runner: Runner, device: torch.device, dtype: torch.dtype) -> dict[str, Callable[[], float]]:
    """By constant, functions that all ranks call in the same order."""
    ranks = runner.ranks

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=torch.float32).to(dtype)

    def projection_flops() -> float:
        rows, weight = normal(_ROWS, _SIDE), normal(_SIDE, _SIDE)
        return 2 * _ROWS * _SIDE * _SIDE / _fastest(lambda: rows @ weight.T, device)

    def attention_flops() -> float:
        q, k, v = (normal(1, _HEADS, _TOKENS, _WIDTH) for _ in range(3))
        work = 4 * _HEADS * _TOKENS * _TOKENS * _WIDTH
        return work / _fastest(lambda: scaled_dot_product_attention(q, k, v), device)

    def weight_bandwidth() -> float:
        weights, row = normal(8 * _SIDE, _SIDE), normal(1, _SIDE)
        return weights.nbytes / _fastest(lambda: row @ weights.T, device)

    def kv_bandwidth() -> float:
        q, (k, v) = normal(1, _HEADS, 1, _WIDTH), (normal(1, _HEADS, _CACHED, _WIDTH) for _ in range(2))
        return 2 * k.nbytes / _fastest(lambda: scaled_dot_product_attention(q, k, v), device)

    def link_bandwidth() -> float:
        part = normal(_MESSAGE)
        if ranks.size == 1:  # nothing is ever received; what a copy reaches stands in
            return part.nbytes / _fastest(part.clone, device)
        received = part.nbytes * (ranks.size - 1)
        return received / _fastest(lambda: ranks.gather_rows(part, [_MESSAGE] * ranks.size), device)

    def collective_latency() -> float:
        word = normal(1)
        return _fastest(lambda: ranks.all_reduce(word), device)

    return {
        each.__name__: each
        for each in (
            projection_flops,
            attention_flops,
            weight_bandwidth,
            kv_bandwidth,
            link_bandwidth,
            collective_latency,
        )
    } | {"step_overhead": lambda: _single_row(runner)}


def _single_row(runner: Runner) -> float:
    """Seconds of a step with one row under the present layout, the fastest of some."""
    steps = []
    for place in range(_TURNS):
        chunk = Chunk(0, 0, place, (0,))
        steps.append(runner.step(StepPlan(place, runner.layout.name, (chunk,), weight_version=runner.weight_version)))
    runner.step(StepPlan(_TURNS, runner.layout.name, release=(0,), weight_version=runner.weight_version))
    return min(each.seconds for each in steps)


def _fastest(run: Callable[[], Any], device: torch.device) -> float:
    """Seconds of the fastest of some turns, after one that does not count."""
    found = []
    for _ in range(_TURNS + 1):
        began = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(time.perf_counter() - began)
    return max(min(found[1:]), 1e-9)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU of {platform.node()}"
