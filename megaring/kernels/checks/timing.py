"""Times of the fused forward beside cuDNN and FlashAttention-2, on one GPU."""

from __future__ import annotations

import functools
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from buddyring.placement import Placement
from megaring.kernels.arena import ArenaLayout, LocalDomain
from megaring.kernels.forward_plan import plan_forward
from megaring.kernels.megaring_forward import RankCall, megaring_forward, to_device

TIMING_SECONDS = 30.0  # rounds stop here

SHAPES = {  # query and KV heads are 32 and 8, D = 128, bf16, causal
    "1 x 8192": (8192,),
    "1 x 32768": (32768,),
    "1 x 65536": (65536,),
    "16 x 4096": (4096,) * 16,
}


def time_forward(folder: Path | None) -> Iterator[dict]:
    """Four shapes: one row per contender and shape, then the host time of a call."""
    torch.manual_seed(0)
    end = time.monotonic() + TIMING_SECONDS
    print(f"clocks before: {driver_version()}")
    table = {}
    for name, lengths in SHAPES.items():
        runs = _contenders(lengths, folder)
        table[name] = _race(runs, rounds=7, seconds=min(9.0, max(1.0, end - time.monotonic())))
        flops = 4 * 128 * 32 * sum(length * (length + 1) // 2 for length in lengths)
        for contender, (median, best, rounds) in table[name].items():
            yield {
                "shape": name,
                "contender": contender,
                "median_ms": median,
                "best_ms": best,
                "rounds": rounds,
                "tflops": flops / median / 1e9,
            }
        library = table[name].get("cudnn", (float("nan"),))[0]
        line = ", ".join(
            f"{contender} {flops / median / 1e9:.0f} ({library / median:.2f}x)"
            for contender, (median, *_) in table[name].items()
        )
        print(f"{name:<10} TFLOP/s (x cuDNN): {line}")
        del runs
        torch.cuda.empty_cache()
    print(f"clocks after: {driver_version()}")
    yield _host_time(folder)


def _host_time(folder: Path | None) -> dict:
    """Host microseconds of one call, with the plan on the device."""
    (run,) = (run for name, run in _contenders((256,), folder).items() if name == "fused")
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


def _contenders(lengths: tuple[int, ...], folder: Path | None) -> dict[str, Callable[[], object]]:
    """Functions that run one forward each: ours with its variants, ours on 8 virtual ranks, cuDNN, FlashAttention-2."""
    batch, length = len(lengths), lengths[0]
    q, k, v = (torch.randn(sum(lengths), heads, 128, device="cuda").bfloat16() for heads in (32, 8, 8))

    def library(backend: SDPBackend) -> Callable[[], object]:
        parts = [part.view(batch, length, -1, 128).transpose(1, 2) for part in (q, k, v)]

        def run(gqa: bool = True) -> object:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=gqa)

        try:
            run()
        except RuntimeError:  # a backend without GQA gets each KV head as often as it is used
            parts[1:] = [part.repeat_interleave(32 // 8, dim=1) for part in parts[1:]]
            return functools.partial(run, gqa=False)
        return run

    runs = {
        "fused": _fused([q, k, v], lengths, 1, folder),
        "cudnn": library(SDPBackend.CUDNN_ATTENTION),
        "fa2": library(SDPBackend.FLASH_ATTENTION),
        "no turns": _fused([q, k, v], lengths, 1, folder, ping_pong=False),
        "L2 16 MB": _fused([q, k, v], lengths, 1, folder, l2_budget=16 << 20),
        "L2 64 MB": _fused([q, k, v], lengths, 1, folder, l2_budget=64 << 20),
    }
    if length >= 16:
        runs["8 ranks"] = _fused([q, k, v], lengths, 8, folder)
    return runs


def _fused(tensors, lengths: tuple[int, ...], ranks: int, folder: Path | None, **options) -> Callable[[], object]:
    """Our kernel on one rank or on virtual ones, each sequence split over all of them."""
    device = torch.device("cuda", 0)
    placement = Placement.from_groups(lengths, ranks, [(0, ranks)] * len(lengths))
    plans = [plan_forward(placement.shards(rank)) for rank in range(ranks)]
    domain = LocalDomain(ranks, ArenaLayout(max(plan.arena_tiles for plan in plans), 8, 128), device)
    calls = []
    for rank, plan in enumerate(plans):
        index = torch.from_numpy(placement.shards(rank).tokens.copy()).to(device)
        q, k, v = tensors if ranks == 1 else [tensor[index] for tensor in tensors]
        lse = torch.empty(q.shape[:2], device=device)
        calls.append(RankCall(to_device(plan, device), q, k, v, torch.empty_like(q), lse))
    return lambda: megaring_forward(domain, calls, softmax_scale=128**-0.5, timeout_s=2.0, folder=folder, **options)


def _race(runs: dict[str, Callable[[], object]], *, rounds: int, seconds: float) -> dict[str, tuple[float, float, int]]:
    """(median ms, best ms, rounds) per contender, their runs interleaved; a contender that fails is left out."""
    times: dict[str, list[float]] = {}
    for name, run in runs.items():
        try:
            run()
            torch.cuda.synchronize()
            times[name] = []
        except RuntimeError as error:
            print(f"{name} does not run: {str(error).splitlines()[0][:200]}")
    end = time.monotonic() + seconds
    for done in range(rounds):
        if done >= 2 and time.monotonic() > end:
            break
        for name in times:
            first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            runs[name]()
            first.record()
            runs[name]()
            last.record()
            torch.cuda.synchronize()
            times[name].append(first.elapsed_time(last))
    return {name: (statistics.median(found), min(found), len(found)) for name, found in times.items()}


def driver_version() -> str:
    """The driver's version and the clocks at this moment, as nvidia-smi tells them."""
    command = ["nvidia-smi", "--query-gpu=driver_version,clocks.sm,clocks.mem", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10).stdout.strip()
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"unknown: {error}"
