"""Random traffic for a worker: requests that arrive, fork, finish, are cancelled and moved, and switches in between.

What happens when depends on a seed alone; tokens are greedy. So two runs of one seed must give the same tokens,
whatever the layouts were.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from rollout_case import VOCABULARY

from megaring.rollout.layout import LAYOUTS
from megaring.rollout.pages import ABSENT
from megaring.rollout.runner import Runner
from megaring.rollout.step import BLOCKING, LAYER_AHEAD, Chunk, Fork, StepPlan

CHUNK = 48  # prompt tokens a request takes at most in one step


@dataclass
class _Request:
    owner: int
    prompt: list[int]
    wanted: int  # new tokens
    done: int = 0
    tokens: list[int] = field(default_factory=list)

    @property
    def pending(self) -> list[int]:
        return (self.prompt + self.tokens)[self.done :]


@dataclass(frozen=True)
class Outcome:
    """Tokens and logits of every request, and what the worker said of its switches."""

    tokens: dict[int, list[int]]
    logits: dict[int, np.ndarray]
    switches: list[tuple[str, str]]
    deferred: list[str]
    moved_bytes: int
    prepared: int  # switches whose first layer had moved under the step before


def drive(runner: Runner, seed: int, *, steps: int = 24, switching: bool = True, fixed: str = "TP") -> Outcome:
    """Run ``steps`` steps of traffic, then drain. ``switching``: whether layouts and owners change on the way."""
    random = np.random.default_rng(seed)
    live: dict[int, _Request] = {}
    finished, logits = {}, {}
    release: list[int] = []
    switches, deferred, moved, number = [], [], 0, 0
    announced, taken = None, 0
    for step in range(10_000):
        draining = step >= steps
        if draining and not live and not release:
            break
        choice = random.integers(0, 2**31, 12)  # of every step, whatever happens in it
        forks = []
        if not draining:
            for arrival in range(int(choice[0] % 3)):
                length = int(choice[1 + arrival] % 150) + 1
                prompt = random.integers(0, VOCABULARY, length).tolist()
                live[number] = _Request(int(choice[3 + arrival]), prompt, int(choice[5 + arrival] % 20) + 1)
                number += 1
            cached = [request for request, each in live.items() if each.done]
            if cached and choice[7] % 2:
                source = cached[int(choice[8]) % len(cached)]
                origin = live[source]
                shared = origin.done if choice[9] % 2 else int(choice[9]) % origin.done + 1
                more = random.integers(0, VOCABULARY, 3).tolist()
                prompt = (origin.prompt + origin.tokens)[:shared] + more
                live[number] = _Request(origin.owner, prompt, 8, done=shared)
                forks.append(Fork(number, source, shared))
                number += 1
            if cached and choice[10] % 4 == 0:
                cancelled = cached[int(choice[11]) % len(cached)]
                if all(fork.source != cancelled for fork in forks):
                    release.append(cancelled)
                    gone = live.pop(cancelled)
                    finished[cancelled] = gone.tokens
        owners, target, mode = [], None, LAYER_AHEAD
        extra = np.random.default_rng((seed, step))
        if announced and extra.random() < 0.7:
            target = announced
        elif switching and extra.random() < 0.5:
            target = str(extra.choice(list(LAYOUTS)))
            mode = str(extra.choice([BLOCKING, LAYER_AHEAD]))
            settled = [r for r, each in live.items() if each.done and all(r != fork.request for fork in forks)]
            if settled and extra.random() < 0.5 and not forks:
                owners = [(request, int(extra.integers(runner.ranks.size))) for request in settled[::2]]
                for request, owner in owners:
                    live[request].owner = owner
        chunks = [
            Chunk(request, each.owner % runner.ranks.size, each.done, tuple(each.pending[:CHUNK]), "last")
            for request, each in live.items()
        ]
        before, prepare = runner.layout.name, None
        if switching and target is None and not owners and chunks and extra.random() < 0.5:
            prepare = str(extra.choice([name for name in LAYOUTS if name != before]))
        plan = StepPlan(
            step,
            before,
            tuple(chunks),
            tuple(release),
            target,
            forks=tuple(forks),
            owners=tuple(owners),
            mode=mode,
            prepare=prepare,
        )
        announced_before = announced
        used, runner.arena.peak = runner.arena.used, runner.arena.used
        result = runner.step(plan)
        check_consistent(runner)
        if result.switched:
            layer = max(used, runner.arena.used) // runner.shape.layers + runner.pages.entry.groups
            assert runner.arena.peak <= max(used, runner.arena.used) + layer, "more than one layer was in transit"
        release, announced = [], prepare if result.prepared else None
        taken += result.switched and announced_before == result.layout
        if result.switched:
            switches.append((before, result.layout))
            moved += result.moved_bytes
        if result.deferred:
            deferred.append(result.deferred)
        for chunk, row in zip(chunks, result.logits.numpy(), strict=True):
            each = live[chunk.request]
            each.done += len(chunk.tokens)
            if each.pending:
                continue
            logits.setdefault(chunk.request, []).append(row)
            each.tokens.append(int(row.argmax()))
            if len(each.tokens) == each.wanted:
                finished[chunk.request] = live.pop(chunk.request).tokens
                release.append(chunk.request)
    assert not runner.ledger.requests
    return Outcome(finished, {r: np.stack(rows) for r, rows in logits.items()}, switches, deferred, moved, taken)


def check_consistent(runner: Runner) -> None:
    """Every layer's table holds exactly the pages that the ledger gives this rank, and no unit twice."""
    slots = np.arange(runner.ledger.slots_made)
    held = runner.ledger.held(slots, runner.layout, runner.ranks.rank)
    here = runner._state.groups(runner.layout)
    expected = np.zeros((len(slots), runner.pages.entry.groups), bool)
    expected[np.ix_(held, list(here))] = True
    for layer in range(runner.shape.layers):
        assert ((runner.pages.table[layer] != ABSENT)[: len(slots)] == expected).all(), f"layer {layer}"
    units = runner.pages.table[runner.pages.table != ABSENT]
    assert len(np.unique(units)) == len(units)
    weights = runner.room.layer_units(runner.layout, np.zeros(runner.ranks.size, int))[runner.ranks.rank]
    prepared = runner._switcher.prepared
    in_transit = 0
    if prepared:
        in_transit += sum(map(len, prepared._incoming))
        in_transit += len(runner.projections.foreign_units(0)) if prepared.manifest.weight_transfers else 0
    assert runner.arena.used == in_transit + len(units) + runner.shape.layers * weights
