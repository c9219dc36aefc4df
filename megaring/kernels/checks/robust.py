"""What ordinary calls do not show: replays of a CUDA graph, offsets past 2^31 elements, roles that pause at random."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import torch

from buddyring.placement import Placement
from megaring.kernels.checks.bank import attention_fp64
from megaring.kernels.checks.calls import Calls, prepare
from megaring.kernels.checks.forward import LSE_LIMIT
from megaring.kernels.checks.units import relative_error
from megaring.kernels.compile import build
from megaring.kernels.specialisations import forward

REPLAYS = 6
REPEATS = 500
ROUNDED = {torch.bfloat16: 4e-3, torch.float16: 6e-4}  # relative error of output and probabilities rounded once each
PLACEMENTS = {
    "1 rank": Placement.from_groups([1000, 300, 77, 2048], 1, [(0, 1)] * 4, rank_multiple=64),
    "2 ranks": Placement.from_groups([1000, 300, 77, 2048], 2, [(0, 2), (1, 1), (0, 1), (0, 2)]),
    "4 ranks": Placement.from_groups([1000, 300, 77, 2048, 9], 4, [(0, 4), (0, 2), (3, 1), (0, 4), (2, 2)]),
    "8 ranks": Placement.from_groups([3000, 300, 16, 2048, 700], 8, [(0, 8), (0, 2), (0, 8), (4, 4), (6, 2)]),
}


def check_graph(folder: Path | None) -> Iterator[dict]:
    """A captured call, replayed and mixed with ordinary ones, is bit-equal to them, also for new values."""
    for name, placement in PLACEMENTS.items():
        calls = _random_calls(placement)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            calls.run(timeout_s=2.0, folder=folder)
        first = calls.outputs()
        with torch.cuda.graph(graph, stream=stream):
            calls.launch(timeout_s=2.0, folder=folder)
        differing, launched = 0, 1
        for fresh in (False, True):
            if fresh:
                for call in calls.calls:
                    call.q.mul_(0.5)
                    call.v.neg_()
            wanted = first
            for replay in range(REPLAYS):
                calls.poison()
                if replay == 0 and fresh:
                    calls.run(timeout_s=2.0, folder=folder)
                    wanted = calls.outputs()
                else:
                    graph.replay()
                    torch.cuda.synchronize()
                    calls.domain.check()
                launched += 1
                differing += calls.differing(wanted)
        epochs = {int(arena[:8].view(torch.int64)) for arena in calls.domain.arenas}
        changed = calls.differing(first)
        passed = differing == 0 and epochs == {launched} and changed > 0
        print(
            f"{'PASS' if passed else 'FAIL'} {name}: {launched} launches, epochs {sorted(epochs)}, {differing} differ"
        )
        yield {"name": name, "passed": passed, "launches": launched, "epochs": sorted(epochs), "differing": differing}


def check_delays(folder: Path | None, *, repeats: int = REPEATS) -> Iterator[dict]:
    """Calls whose roles pause at random give the bits of calls that do not, ``repeats`` times for each placement."""
    delayed, plain = (
        build(forward(128, bfloat16=True, causal=True, delays=delays), folder=folder) for delays in (True, False)
    )
    if delayed.cubin == plain.cubin:
        print("FAIL the variant with delays is the same machine code as the one without")
        yield {"name": "variant", "passed": False, "detail": "it has no delays"}
        return
    for name, placement in PLACEMENTS.items():
        calls = _random_calls(placement)
        calls.run(timeout_s=5.0, folder=folder)
        first, differing, start = calls.outputs(), 0, time.monotonic()
        for _ in range(repeats):
            calls.poison()
            calls.run(timeout_s=5.0, folder=folder, delays=True)
            differing += calls.differing(first) > 0
        seconds = time.monotonic() - start
        passed = differing == 0
        print(f"{'PASS' if passed else 'FAIL'} {name}: {differing} of {repeats} repeats differ, {seconds:.1f} s")
        yield {"name": name, "passed": passed, "repeats": repeats, "differing": differing, "seconds": seconds}


def check_offsets(folder: Path | None) -> Iterator[dict]:
    """Inputs, outputs and arenas of more than 2^31 elements, checked on sequences from their start to their end."""
    short = (100, 128, 200, 64, 257)
    rows = 2**31 // (32 * 128)
    whole = short * (rows // sum(short) + 10)
    yield _far("inputs and outputs", Placement.from_groups(whole, 1, [(0, 1)] * len(whole)), folder)
    # Of 512 tokens on two ranks, rank 0 receives two tiles of 128 rows; a buffer holds K and V, and there are two.
    split = (512,) * (rows // (4 * 2 * 128) + 10)
    yield _far("arena", Placement.from_groups(split, 2, [(0, 2)] * len(split)), folder)


def _far(name: str, placement: Placement, folder: Path | None) -> dict:
    device = torch.device("cuda", torch.cuda.current_device())
    generator = torch.Generator(device).manual_seed(0)
    total = sum(placement.lengths)
    tensors = tuple(
        torch.randn(total, 32, 128, device=device, dtype=torch.bfloat16, generator=generator) for _ in range(3)
    )
    calls = prepare(placement, tensors)
    calls.run(timeout_s=5.0, folder=folder)
    calls.poison()
    calls.run(timeout_s=5.0, folder=folder)  # the second call uses the arena's other buffer
    layout = calls.domain.layout
    elements = max(calls.calls[0].q.numel(), 4 * layout.rows * layout.kv_heads * layout.head_dim)
    count = len(placement.lengths)
    samples = sorted({0, count // 3, count // 2, *range(count - 12, count)})
    ends = torch.tensor(placement.lengths).cumsum(0).tolist()
    found: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for sequence, positions, out, lse in calls.pieces():
        if sequence not in samples:
            continue
        length = placement.lengths[sequence]
        whole = found.setdefault(sequence, (out.new_zeros((length, 32, 128)), lse.new_zeros((length, 32))))
        whole[0][positions], whole[1][positions] = out, lse
    worst = worst_lse = 0.0
    for sequence, (out, lse) in found.items():
        rows = slice(ends[sequence] - placement.lengths[sequence], ends[sequence])
        wanted, wanted_lse = attention_fp64(*(tensor[rows] for tensor in tensors), causal=True)
        worst, worst_lse = max(worst, relative_error(out, wanted)), max(worst_lse, relative_error(lse, wanted_lse))
    finite = all(bool(call.out.isfinite().all()) for call in calls.calls)
    passed = elements > 2**31 and len(found) == len(samples) and finite
    passed &= worst <= ROUNDED[torch.bfloat16] and worst_lse <= LSE_LIMIT
    print(
        f"{'PASS' if passed else 'FAIL'} {name}: {elements / 2**31:.2f} x 2^31 elements, {len(found)} of {count} "
        f"sequences compared: output {worst:.1e}, LSE {worst_lse:.1e}, all finite: {finite}"
    )
    return {"name": name, "passed": passed, "elements": elements, "output": worst, "lse": worst_lse, "finite": finite}


def _random_calls(placement: Placement) -> Calls:
    device = torch.device("cuda", torch.cuda.current_device())
    generator = torch.Generator(device).manual_seed(0)
    heads = (8, 2, 2)
    tensors = tuple(
        torch.randn(sum(placement.lengths), each, 128, device=device, generator=generator).bfloat16() for each in heads
    )
    return prepare(placement, tensors)
