"""What an engine has done and is doing: a record per step, totals, and the text that Prometheus reads. No torch."""

from __future__ import annotations

import time
from collections import Counter, deque
from dataclasses import dataclass, field

_WINDOW = 10.0  # seconds over which tokens per second are counted


@dataclass(frozen=True)
class StepRecord:
    """One step. ``began``: seconds since the engine started; ``seconds``: its duration, choice of tokens included.

    ``rows``: tokens that the model saw; ``drawn``: new ones. ``kv_use``: part of the fullest rank's pages in use after
    it. ``switched_from``: the layout before, where it changed. ``deferred``: why a switch that was wanted did not
    happen.
    """

    step: int
    began: float
    seconds: float
    layout: str
    rows: int
    drawn: int
    running: int
    waiting: int
    kv_use: float
    preempted: int = 0
    switched_from: str | None = None
    deferred: str | None = None
    moved_bytes: int = 0


@dataclass
class Metrics:
    """Figures of one engine. ``steps`` keeps the last ``steps.maxlen`` records."""

    steps: deque[StepRecord] = field(default_factory=lambda: deque(maxlen=1 << 16))
    switches: Counter[tuple[str, str]] = field(default_factory=Counter)
    finished: Counter[str] = field(default_factory=Counter)
    drawn: int = 0
    rows: int = 0
    preempted: int = 0
    refused: int = 0
    began: float = field(default_factory=time.monotonic)

    def now(self) -> float:
        """Seconds since the engine started."""
        return time.monotonic() - self.began

    def record(self, step: StepRecord) -> None:
        """Take in one step."""
        self.steps.append(step)
        self.drawn += step.drawn
        self.rows += step.rows
        self.preempted += step.preempted
        if step.switched_from is not None:
            self.switches[step.switched_from, step.layout] += 1

    @property
    def tokens_per_second(self) -> float:
        """New tokens per second over the last ten seconds, or since the start."""
        now = self.now()
        since = max(0.0, now - _WINDOW)
        drawn = 0
        for step in reversed(self.steps):
            if step.began + step.seconds < since:
                break
            drawn += step.drawn
        return drawn / max(now - since, 1e-9)

    def prometheus(self, running: int, waiting: int, layout: str, kv_use: float, version: int) -> str:
        """All of it in Prometheus' text format (version 0.0.4)."""
        gauges = {
            "running": ("sequences with a history", running),
            "waiting": ("sequences that wait for room", waiting),
            "kv_use": ("part of the fullest rank's KV pages in use", round(kv_use, 6)),
            "tokens_per_second": ("new tokens per second over the last ten seconds", round(self.tokens_per_second, 3)),
            "weight_version": ("version of the weights in use", version),
        }
        counters = {
            "generated_tokens": ("new tokens", self.drawn),
            "rows": ("tokens that the model has seen", self.rows),
            "preemptions": ("sequences that gave up their history for an older one", self.preempted),
            "refused_requests": ("requests refused because the queue was full", self.refused),
        }
        lines = []
        for name, (text, value) in gauges.items():
            lines += _metric(name, "gauge", text, [("", value)])
        for name, (text, value) in counters.items():
            lines += _metric(f"{name}_total", "counter", text, [("", value)])
        lines += _metric("layout", "gauge", "1 for the layout in use", [(f'{{layout="{layout}"}}', 1)])
        switches = [(f'{{source="{a}",destination="{b}"}}', n) for (a, b), n in sorted(self.switches.items())]
        lines += _metric("switches_total", "counter", "changes of layout", switches)
        finished = [(f'{{reason="{reason}"}}', n) for reason, n in sorted(self.finished.items())]
        lines += _metric("finished_samples_total", "counter", "samples that have ended", finished)
        return "\n".join(lines) + "\n"


def _metric(name: str, kind: str, text: str, values: list[tuple[str, float]]) -> list[str]:
    full = f"megaring_{name}"
    return [f"# HELP {full} {text}", f"# TYPE {full} {kind}", *(f"{full}{labels} {value}" for labels, value in values)]
