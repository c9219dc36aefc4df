"""Check and time the fused forward kernel on one Hopper GPU.

``python scripts/check_fused.py --out results.json`` builds the kernels, checks each device layer alone, then whole
calls against fp64 on up to eight virtual ranks, then a peer that never comes, and times four shapes beside cuDNN and
FlashAttention-2. Every stage has a limit; one that fails or hangs ends its process, and a fresh one takes
the next stage, so a sticky CUDA error does not spread.
"""

from __future__ import annotations

import argparse
import functools
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

STAGES = ("build", "units", "simple", "plain", "random", "watchdog", "timing")
LIMITS = {"build": 40, "units": 15, "simple": 25, "plain": 15, "random": 30, "watchdog": 10, "timing": 45}  # seconds
RANDOM_SECONDS = 15.0  # random cases stop here
IMPORT_SECONDS = 30.0  # a fresh worker's imports may take this long, on top of a stage's limit
TIMING_SECONDS = 30.0  # and rounds of timing here

SHAPES = {  # query and KV heads are 32 and 8, D = 128, bf16, causal
    "1 x 8192": (8192,),
    "1 x 32768": (32768,),
    "1 x 65536": (65536,),
    "16 x 4096": (4096,) * 16,
}


def main() -> int:
    """Run the stages, write the JSON and print a table; 1 when something failed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("check_fused.json"), help="where to write the results")
    parser.add_argument("--stages", default=",".join(STAGES), help=f"comma-separated, of {', '.join(STAGES)}")
    parser.add_argument("--total-seconds", type=float, default=110.0, help="no stage runs past this")
    parser.add_argument("--folder", type=Path, help="cache of compiled kernels (default: the user's)")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    stages = options.stages.split(",")
    if unknown := set(stages) - set(STAGES):
        parser.error(f"unknown stages {sorted(unknown)}; choose from {', '.join(STAGES)}")
    if options.worker:
        _work(stages, options.out, options.folder)
        return 0
    end = time.monotonic() + options.total_seconds
    results: dict[str, dict] = {stage: {"rows": [], "seconds": 0.0, "note": "not run"} for stage in stages}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    while stages and time.monotonic() < end:
        stages = _supervise(stages, end, options, results)
        _save(options.out, results)
    print(f"\n{'stage':<10} {'passed':>7} {'failed':>7} {'seconds':>8}  note")
    bad = False
    for stage, result in results.items():
        failed = sum(not row.get("passed", True) for row in result["rows"])
        bad |= bool(failed or result["note"])
        passed = len(result["rows"]) - failed
        print(f"{stage:<10} {passed:>7} {failed:>7} {result['seconds']:>8.1f}  {result['note']}")
    return int(bad)


def _supervise(stages: list[str], end: float, options: argparse.Namespace, results: dict[str, dict]) -> list[str]:
    """Run stages in one worker until one fails or runs out of time; returns those that are still to be run.

    The worker tells how far it is in a file of JSON lines, so whatever it wrote before it ended is kept.
    """
    progress = options.out.with_name(f"{options.out.stem}.progress")
    progress.write_text("")
    command = [sys.executable, "-u", str(Path(__file__).resolve()), "--worker", "--stages", ",".join(stages)]
    command += ["--out", str(progress), *(["--folder", str(options.folder)] if options.folder else [])]
    errors = progress.with_suffix(".errors")
    with open(errors, "w") as file:
        worker = subprocess.Popen(command, stderr=file)
    current, started, position, note = stages[0], time.monotonic(), 0, ""
    while True:
        ended = worker.poll() is not None
        text = progress.read_text()
        whole = text.rfind("\n") + 1
        for line in text[position:whole].splitlines():
            message = json.loads(line)
            if "row" in message:
                results[message["stage"]]["rows"].append(message["row"])
                continue
            current, started = message["stage"], time.monotonic()
            if "seconds" in message:
                results[current].update(seconds=message["seconds"], note="")
                stages = stages[1:]
        position = whole
        if ended or not stages:
            break
        now = time.monotonic()
        if now > min(started + LIMITS[current] + IMPORT_SECONDS, end):
            worker.kill()
            note = f"stopped after {now - started:.0f} s"
        time.sleep(0.05)
    worker.wait()
    last_words = " | ".join(errors.read_text().strip().splitlines()[-3:])[-500:]
    progress.unlink()
    errors.unlink()
    if not stages:
        return []
    note = note or f"exit {worker.returncode}: {last_words}"
    print(f"   {stages[0]}: {note}", flush=True)
    results[stages[0]].update(seconds=time.monotonic() - started, note=note)
    return stages[1:]


def _save(path: Path, results: dict[str, dict]) -> None:
    path.write_text(
        json.dumps(
            {
                "date": datetime.now(UTC).isoformat(timespec="seconds"),
                "command": " ".join(sys.argv),
                "machine": platform.node(),
                **next((row for row in results.get("build", {}).get("rows", []) if "gpu" in row), {}),
                "stages": results,
            },
            indent=1,
        )
    )


def _work(stages: list[str], progress: Path, folder: Path | None) -> None:
    """The worker: runs stages one after another and appends to ``progress`` what it finds."""
    run: dict[str, Callable[[Path | None], Iterator[dict]]] = {
        "build": _build,
        "units": _units,
        "simple": _simple,
        "plain": _plain,
        "random": _random,
        "watchdog": _watchdog,
        "timing": _timing,
    }
    with open(progress, "a") as file:

        def tell(**message: object) -> None:
            file.write(json.dumps(message) + "\n")
            file.flush()

        for stage in stages:
            print(f"== {stage}", flush=True)
            start = time.monotonic()
            tell(stage=stage)
            for row in run[stage](folder):
                tell(stage=stage, row=row)
            tell(stage=stage, seconds=time.monotonic() - start)


def _build(folder: Path | None) -> Iterator[dict]:
    from concurrent.futures import ThreadPoolExecutor

    import torch

    from megaring.build import faults
    from megaring.kernels.compile import build, nvrtc_version
    from megaring.kernels.specialisations import every_specialisation, forward, unit_kernels

    gpu = torch.cuda.get_device_properties(0)
    yield {
        "gpu": f"{gpu.name}, {gpu.multi_processor_count} SMs",
        "driver": _driver_version(),
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "nvrtc": "{}.{}".format(*nvrtc_version()),
        "python": platform.python_version(),
    }
    plain = [forward(head_dim, bfloat16=True, causal=True, ping_pong=False) for head_dim in (128, 64)]
    plain += [forward(128, bfloat16=True, causal=False, ping_pong=False), forward(128, bfloat16=False, causal=True)]
    wanted = list(dict.fromkeys([*every_specialisation(), *plain, *unit_kernels()]))
    with ThreadPoolExecutor(8) as pool:
        for built in pool.map(lambda each: build(each, folder=folder), wanted):
            found = faults(built)
            if found:
                print(f"FAIL {built.specialisation.label}: {found}")
            yield {"name": built.specialisation.label, "passed": not found, "seconds": built.seconds}


def _driver_version() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version,clocks.sm,clocks.mem", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10).stdout.strip()
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"unknown: {error}"


def _units(folder: Path | None) -> Iterator[dict]:
    import torch

    from megaring.kernels.checks.units import unit_checks

    torch.manual_seed(0)
    for name, run in unit_checks(folder):
        checks = run()
        torch.cuda.synchronize()
        passed = all(error <= limit for _, error, limit in checks)
        print(
            f"{'PASS' if passed else 'FAIL'} {name}: " + ", ".join(f"{what} {error:.1e}" for what, error, _ in checks)
        )
        yield {"name": name, "passed": passed, "checks": checks}


def _simple(folder: Path | None) -> Iterator[dict]:
    from megaring.kernels.checks.forward import simple_cases

    yield from _cases(simple_cases(), folder, quiet=False)


def _plain(folder: Path | None) -> Iterator[dict]:
    """The same without turns on the tensor cores: tells a fault of those from one of the rest."""
    from megaring.kernels.checks.forward import simple_cases

    yield from _cases(simple_cases()[:9], folder, quiet=False, ping_pong=False)


def _random(folder: Path | None) -> Iterator[dict]:
    from megaring.kernels.checks.forward import random_case

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
    cases, folder: Path | None, *, quiet: bool, end: float | None = None, ping_pong: bool = True
) -> Iterator[dict]:
    from megaring.kernels.arena import PeerTimeout
    from megaring.kernels.checks.forward import run_case

    failures = 0
    for case in cases:
        if end is not None and time.monotonic() > end:
            return
        try:
            result = run_case(case, folder=folder, ping_pong=ping_pong)
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


def _watchdog(folder: Path | None) -> Iterator[dict]:
    """A rank whose peer never comes: an error with its record within the bound, and NaN instead of numbers."""
    import torch

    from buddyring.placement import Placement
    from megaring.kernels.arena import ArenaLayout, LocalDomain, PeerTimeout
    from megaring.kernels.forward_plan import plan_forward
    from megaring.kernels.megaring_forward import RankCall, megaring_forward, to_device

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


def _timing(folder: Path | None) -> Iterator[dict]:
    import torch

    torch.manual_seed(0)
    end = time.monotonic() + TIMING_SECONDS
    print(f"clocks before: {_driver_version()}")
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
    print(f"clocks after: {_driver_version()}")
    yield _host_time(folder)


def _host_time(folder: Path | None) -> dict:
    """Host microseconds of one call, with the plan on the device."""
    import torch

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
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

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
    import torch

    from buddyring.placement import Placement
    from megaring.kernels.arena import ArenaLayout, LocalDomain
    from megaring.kernels.forward_plan import plan_forward
    from megaring.kernels.megaring_forward import RankCall, megaring_forward, to_device

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
    import statistics

    import torch

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


if __name__ == "__main__":
    sys.exit(main())
