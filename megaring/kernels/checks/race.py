"""Times of several ways to do the same thing, measured side by side so that a drifting clock favours none.

In every round each contender runs once to warm up and then timed. The order changes from round to round such that over
as many rounds as there are contenders (twice as many for an odd number) each directly follows each other one equally
often: a Latin square balanced for carry-over effects (Williams 1949). What is compared is the median over rounds of the
ratio within a round. The GPU's clock and power are read once per round, outside timed regions.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist

from megaring.kernels.checks.gpu_state import GpuState, gpu_state

LEAST_MS = 3.0  # a timed region holds as many calls as take this long
MOST_CALLS = 16


@dataclass(frozen=True, eq=False)
class Contender:
    """Something to be timed. flops: useful floating-point operations of a call, on all ranks together."""

    name: str
    run: Callable[[], object]
    flops: float


@dataclass(frozen=True)
class Times:
    """Milliseconds of a call in each round, of the slowest rank; calls: in one timed region."""

    name: str
    flops: float
    calls: int
    ms: tuple[float, ...]

    @property
    def median(self) -> float:
        """Median of the rounds, in ms."""
        return statistics.median(self.ms)

    def tflops(self, ranks: int = 1) -> float:
        """TFLOP/s per rank at the median time."""
        return self.flops / self.median / 1e9 / ranks

    def speed(self, other: Times) -> float:
        """How many times faster than ``other``: the median over the rounds of the ratio within a round."""
        return statistics.median(theirs / ours for ours, theirs in zip(self.ms, other.ms, strict=True))


@dataclass(frozen=True)
class Race:
    """The times by name, in the order given, and the first rank's GPU in each round (None where it cannot be read)."""

    times: dict[str, Times]
    states: tuple[GpuState | None, ...]

    def rows(self, baseline: str) -> list[dict]:
        """JSON-ready: one per contender, with its speed relative to ``baseline`` if that ran."""
        return [
            {
                "contender": name,
                "median_ms": times.median,
                "best_ms": min(times.ms),
                "rounds_ms": times.ms,
                "calls": times.calls,
                "tflops": times.tflops(),
                "speed": times.speed(self.times[baseline]) if baseline in self.times else None,
            }
            for name, times in self.times.items()
        ]

    def clocks(self) -> dict:
        """JSON-ready: what the GPU did in each round."""
        return {"rounds": [None if state is None else asdict(state) for state in self.states]}

    def clock_range(self) -> str:
        """``1635-1980 MHz, 480-690 W`` over the rounds."""
        seen = [state for state in self.states if state is not None]
        if not seen:
            return "clocks unknown"
        clocks, power = [state.sm_mhz for state in seen], [state.power_w for state in seen]
        return f"{min(clocks)}-{max(clocks)} MHz, {min(power):.0f}-{max(power):.0f} W"


class Alone:
    """A race on one rank."""

    rank = 0

    def align(self) -> None:
        """Nothing to wait for."""

    def most(self, values: Sequence[float]) -> list[float]:
        """The values of the slowest rank."""
        return list(values)


class Together:
    """A race of all ranks of a process group: each region begins at the same time, and the slowest rank counts."""

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device):
        self.rank = dist.get_rank(group)
        self._group = group
        self._token = torch.zeros(1, device=device)

    def align(self) -> None:
        """The streams of all ranks go on together."""
        dist.all_reduce(self._token, group=self._group)

    def most(self, values: Sequence[float]) -> list[float]:
        """Elementwise maximum over the ranks; waits for them, within the group's timeout."""
        shared = torch.tensor(values, dtype=torch.float64, device=self._token.device)
        dist.all_reduce(shared, dist.ReduceOp.MAX, group=self._group)
        return shared.tolist()


def balanced_order(count: int, turn: int) -> list[int]:
    """The order of ``count`` contenders in round ``turn``."""
    zigzag = [0, *((step + 1) // 2 if step % 2 else count - step // 2 for step in range(1, count))]
    order = [(place + turn) % count for place in zigzag]
    # With an odd number the square alone is not balanced; with its mirror image it is.
    return order[::-1] if count % 2 and turn // count % 2 else order


def race(
    contenders: Sequence[Contender],
    *,
    rounds: int,
    seconds: float = math.inf,
    ranks: Alone | Together | None = None,
    device: int = 0,
) -> Race:
    """Time the contenders for ``rounds`` rounds, or fewer (at least 2) if they take longer than ``seconds``.

    A contender whose first call raises is named and left out; with several ranks it has to raise on all of them.
    """
    ranks = ranks or Alone()
    running: dict[str, tuple[Contender, int]] = {}
    for contender in contenders:
        try:
            contender.run()  # compiles, plans, allocates
            torch.cuda.synchronize()
            (ms,) = ranks.most([_timed(contender, 1, ranks)])
        except (RuntimeError, ValueError, TypeError) as error:
            if ranks.rank == 0:
                print(f"{contender.name} does not run: {str(error).strip().splitlines()[0][:200]}", flush=True)
            continue
        running[contender.name] = (contender, max(1, min(MOST_CALLS, math.ceil(LEAST_MS / max(ms, 1e-3)))))
    found: dict[str, list[float]] = {name: [] for name in running}
    states = []
    names, end = list(running), time.monotonic() + seconds
    for turn in range(rounds if names else 0):
        order = [names[place] for place in balanced_order(len(names), turn)]
        here = [_timed(*running[name], ranks) for name in order]
        for name, ms in zip(order, ranks.most(here), strict=True):
            found[name].append(ms)
        running[order[0]][0].run()  # so that the GPU is read at work
        states.append(gpu_state(device))
        torch.cuda.synchronize()
        (late,) = ranks.most([float(time.monotonic() > end)])
        if turn >= 1 and late:
            break
    times = {name: Times(name, running[name][0].flops, running[name][1], tuple(found[name])) for name in names}
    return Race(times, tuple(states))


def _timed(contender: Contender, calls: int, ranks: Alone | Together) -> float:
    """Milliseconds of a call on this rank, over ``calls`` calls that follow one untimed."""
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    contender.run()
    ranks.align()
    first.record()
    for _ in range(calls):
        contender.run()
    last.record()
    torch.cuda.synchronize()
    return first.elapsed_time(last) / calls
