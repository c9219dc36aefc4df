"""The stages of the self-check but for timing: each yields a JSON-ready row per check and prints what people read."""

from __future__ import annotations

import platform
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from buddyring.placement import Placement
from megaring.build import faults
from megaring.kernels.arena import ArenaLayout, LocalDomain, PeerTimeout
from megaring.kernels.checks.forward import Case, random_case, run_case, simple_cases
from megaring.kernels.checks.gpu_state import driver_version
from megaring.kernels.checks.units import unit_checks
from megaring.kernels.compile import build, nvrtc_version
from megaring.kernels.forward_plan import plan_forward
from megaring.kernels.megaring_forward import RankCall, megaring_forward, to_device
from megaring.kernels.specialisations import every_specialisation, forward, unit_kernels

RANDOM_SECONDS = 15.0  # random cases stop here


def check_build(folder: Path | None) -> Iterator[dict]:
    """Compile everything; the first row describes the machine."""
    gpu = torch.cuda.get_device_properties(0)
    yield {
        "gpu": f"{gpu.name}, {gpu.multi_processor_count} SMs",
        "driver": driver_version(),
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "nvrtc": "{}.{}".format(*nvrtc_version()),
        "python": platform.python_version(),
    }
    turns = [forward(head_dim, bfloat16=True, causal=True, ping_pong=True) for head_dim in (128, 64)]
    turns += [forward(128, bfloat16=True, causal=False, ping_pong=True)]
    turns += [forward(128, bfloat16=False, causal=True, ping_pong=True)]
    wanted = [*every_specialisation(), *turns, *unit_kernels()]
    with ThreadPoolExecutor(8) as pool:
        for built in pool.map(lambda each: build(each, folder=folder), wanted):
            found = faults(built)
            if found:
                print(f"FAIL {built.specialisation.label}: {found}")
            yield {"name": built.specialisation.label, "passed": not found, "seconds": built.seconds}


def check_units(folder: Path | None) -> Iterator[dict]:
    """Each device layer alone."""
    torch.manual_seed(0)
    for name, run in unit_checks(folder):
        checks = run()
        torch.cuda.synchronize()
        passed = all(error <= limit for _, error, limit in checks)
        print(
            f"{'PASS' if passed else 'FAIL'} {name}: " + ", ".join(f"{what} {error:.1e}" for what, error, _ in checks)
        )
        yield {"name": name, "passed": passed, "checks": checks}


def check_simple(folder: Path | None, *, timeout_s: float = 1.0) -> Iterator[dict]:
    """Whole calls, one difficulty more at a time."""
    yield from _cases(simple_cases(), folder, quiet=False, timeout_s=timeout_s)


def check_turns(folder: Path | None) -> Iterator[dict]:
    """The same with consumers that take turns on the tensor cores."""
    yield from _cases(simple_cases(), folder, quiet=False, ping_pong=True)


def check_random(folder: Path | None) -> Iterator[dict]:
    """Random mixes of lengths, groups, heads, types and masks until the time is up."""
    end = time.monotonic() + RANDOM_SECONDS
    rows = []
    for row in _cases((random_case(seed) for seed in range(400)), folder, quiet=True, end=end):
        rows.append(row)
        yield row
    judged = [row for row in rows if "output" in row]
    if judged:
        print(
            f"{sum(row['passed'] for row in rows)} of {len(rows)} random mixes passed; worst output error "
            f"{max(row['output'] for row in judged):.2e}, worst LSE error {max(row['lse'] for row in judged):.2e}, "
            f"worst ratio to the library {max(row['output'] / max(row['library'], 1e-9) for row in judged):.2f}"
        )


def _cases(
    cases: Iterable[Case],
    folder: Path | None,
    *,
    quiet: bool,
    end: float | None = None,
    ping_pong: bool = False,
    timeout_s: float = 1.0,
) -> Iterator[dict]:
    failures = 0
    for case in cases:
        if end is not None and time.monotonic() > end:
            return
        try:
            result = run_case(case, folder=folder, ping_pong=ping_pong, timeout_s=timeout_s)
        except PeerTimeout as error:
            print(f"FAIL {case.label} seed {case.seed}: {error}")
            yield {"name": case.label, "passed": False, "detail": str(error)}
            continue
        failures += not result.passed
        if not quiet or (not result.passed and failures <= 12):
            print(
                f"{'PASS' if result.passed else 'FAIL'} {case.label} seed {case.seed}: output {result.output:.2e} "
                f"(library {result.library:.2e}), LSE {result.lse:.1e}"
                f"{'' if result.repeatable else ', NOT REPEATABLE'} {result.detail}"
            )
        yield {
            "name": f"{case.label} seed {case.seed}",
            "passed": result.passed,
            "output": result.output,
            "library": result.library,
            "lse": result.lse,
            "repeatable": result.repeatable,
            "detail": result.detail,
        }


def check_watchdog(folder: Path | None) -> Iterator[dict]:
    """A rank whose peer never comes: an error with its record within the bound, and NaN instead of numbers."""
    device = torch.device("cuda", 0)
    placement = Placement.from_groups([4000, 300], 2, [(0, 2), (0, 1)])
    plan = plan_forward(placement.shards(0))
    domain = LocalDomain(2, ArenaLayout(plan.arena_tiles, 2, 128), device)
    q, k, v = (torch.randn(plan.rows, heads, 128, device=device).bfloat16() for heads in (4, 2, 2))
    out, lse = torch.zeros_like(q), torch.zeros(q.shape[:2], device=device)
    call = RankCall(to_device(plan, device), q, k, v, out, lse)
    start = time.monotonic()
    megaring_forward(domain, [call], softmax_scale=0.1, timeout_s=0.5, folder=folder)
    torch.cuda.synchronize()
    seconds = time.monotonic() - start
    try:
        domain.check()
        message = "no error was raised"
    except PeerTimeout as error:
        message = str(error)
    poisoned = bool(out.isnan().all() and lse.isnan().all())
    passed = poisoned and "rank 0 waited for a tile from rank 1" in message and seconds < 5
    print(f"{'PASS' if passed else 'FAIL'} peer that never comes: {seconds:.2f} s, all NaN: {poisoned}, {message}")
    yield {"name": "peer that never comes", "passed": passed, "seconds": seconds, "message": message}
