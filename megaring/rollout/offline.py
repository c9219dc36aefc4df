"""Batches without a server: all prompts in, all outputs out, with a progress bar."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence

from megaring.rollout.engine import Engine
from megaring.rollout.metrics import StepRecord
from megaring.rollout.request import RequestOutput, SamplingParams

Prompt = tuple[Sequence[int], SamplingParams]


def generate(
    engine: Engine,
    prompts: Sequence[Prompt],
    *,
    progress: bool | None = None,
    say: Callable[[str], None] | None = None,
) -> list[RequestOutput]:
    """Run all ``prompts`` to their end and return their outputs in order.

    ``progress``: a bar on stderr, by default where that is a terminal. ``say``: told of every change of layout, in one
    line. Requests are queued as the engine has room to queue them. Raises RequestError for one that it refuses.
    """
    bar = _bar(len(prompts)) if (sys.stderr.isatty() if progress is None else progress) else None
    tell = say if bar is None or say is None else lambda line: bar.write(line, file=sys.stdout)
    places: dict[int, int] = {}
    outputs: list[RequestOutput | None] = [None] * len(prompts)
    done = 0
    try:
        while done < len(prompts):
            while len(places) < len(prompts) and engine.queued_requests < engine.config.max_waiting:
                places[engine.add(*prompts[len(places)])] = len(places)
            before = len(engine.metrics.steps) and engine.metrics.steps[-1].step
            for delta in engine.step():
                if delta.completed is not None and delta.request in places:
                    outputs[places[delta.request]] = delta.completed
                    done += 1
                    if bar is not None:
                        bar.update()
            last = engine.metrics.steps[-1] if engine.metrics.steps else None
            if last is not None and last.step != before:
                if tell is not None and last.switched_from is not None:
                    tell(switch_line(last))
                if bar is not None:
                    speed = f"{engine.metrics.tokens_per_second:,.0f} tokens/s"
                    bar.set_postfix_str(f"{last.layout}, {last.running} running, {speed}", refresh=False)
    finally:
        if bar is not None:
            bar.close()
    return outputs


def switch_line(step: StepRecord) -> str:
    """A change of layout, for a person."""
    return (
        f"step {step.step}: {step.switched_from} -> {step.layout}, {step.moved_bytes / 2**20:.2f} MiB moved, "
        f"{step.running} running, {step.seconds * 1e3:.1f} ms"
    )


def summary_lines(engine: Engine, outputs: Sequence[RequestOutput]) -> list[str]:
    """What a batch came to, for a person."""
    steps = engine.metrics.steps
    tokens = sum(len(sample.tokens) for output in outputs for sample in output.samples)
    seconds = steps[-1].began + steps[-1].seconds - steps[0].began if steps else 0.0
    layouts = Counter(step.layout for step in steps)
    deferred = sum(step.deferred is not None for step in steps)
    reasons = Counter(sample.finish_reason for output in outputs for sample in output.samples)
    return [
        f"{len(outputs)} requests, {tokens:,} new tokens in {len(steps)} steps and {seconds:.1f} s: "
        f"{tokens / max(seconds, 1e-9):,.0f} tokens/s",
        "steps by layout: " + ", ".join(f"{name} {count}" for name, count in layouts.items()),
        f"{engine.metrics.switches.total()} switches, {deferred} steps with one deferred, "
        f"{engine.metrics.preempted} preemptions",
        "finished: " + ", ".join(f"{reason} {count}" for reason, count in reasons.items()),
    ]


def _bar(total: int):
    from tqdm import tqdm

    return tqdm(total=total, unit="request", dynamic_ncols=True)
