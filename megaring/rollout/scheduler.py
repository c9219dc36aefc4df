"""Which layout the next step runs in (SPLASH, section 4.2): the cheapest feasible one, once its lead is worth a switch.

The scheduler sees candidates only: what each layout would cost, whether it fits, and what getting there exposes.
``assess.py`` makes them from a batch; a replay injects costs that were measured.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from megaring.rollout.layout import Layout, layout_named

STAY, SWITCH, DEFER = "stay", "switch", "defer"


@dataclass(frozen=True)
class Candidate:
    """One layout as the next step could run in it.

    ``seconds``: predicted time of the step. ``misfit``: why it cannot hold the batch (SPLASH, equation 6), or empty.
    ``exposed``: seconds of transfer that a switch to it from the current layout leaves uncovered (equation 7).
    ``no_passage``: why the switch itself has no room now (equation 5), or empty. Raises ValueError for times that are
    not finite, a step of no time, or negative exposure.
    """

    seconds: float
    misfit: str = ""
    exposed: float = 0.0
    no_passage: str = ""

    def __post_init__(self) -> None:
        if not (0 < self.seconds < math.inf and 0 <= self.exposed < math.inf):
            raise ValueError(f"a step of {self.seconds} s with {self.exposed} s exposed; times are finite and above 0")


@dataclass(frozen=True)
class Policy:
    """When a lead is worth a switch.

    ``margin``: least lead, as a fraction of the current step's time. ``payback_steps``: within how many steps at the
    current step time the lead must earn back the exposed transfer; so the lead asked for is the larger of ``margin``
    and ``exposed / (payback_steps x step time)``, which is next to nothing in a prefill step of seconds and counts in
    a decode step of 15 ms. ``min_dwell``: steps to stay in a layout after a switch; one that no longer fits is left at
    once. ``forced``: the name of a layout to use whatever it costs. Raises ValueError for values outside their range.
    """

    margin: float = 0.03
    payback_steps: int = 64
    min_dwell: int = 16
    forced: str | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.margin < 1:
            raise ValueError(f"margin is {self.margin}; it is a fraction of a step's time, at least 0 and below 1")
        if self.payback_steps < 1:
            raise ValueError(f"payback_steps is {self.payback_steps}; it is at least 1")
        if self.min_dwell < 0:
            raise ValueError(f"min_dwell is {self.min_dwell}; it is at least 0")
        if self.forced is not None:
            layout_named(self.forced)


@dataclass(frozen=True)
class Decision:
    """What the scheduler chose for one step, and what it chose from.

    ``action``: ``stay``, ``switch``, or ``defer`` where a switch is wanted and has to wait. ``layout``: the one that
    the step runs in; ``previous``: the one before it; ``wanted``: the one to be in. ``reason`` explains the action.
    ``seconds``: by layout, what the step would cost; ``misfits``: by layout, why it does not fit. ``lead`` of
    ``wanted`` over ``previous`` and the lead ``required`` of it are fractions of the step's time in ``previous``.
    """

    step: int
    action: str
    layout: str
    previous: str
    wanted: str
    reason: str
    seconds: Mapping[str, float]
    misfits: Mapping[str, str]
    lead: float
    required: float

    def to_json(self) -> str:
        """One line of a log."""
        return json.dumps(asdict(self))


@dataclass(frozen=True)
class _Wish:
    """The layout to be in, the lead that was asked of it, why, and what the way there waits for, if anything."""

    layout: str
    required: float
    reason: str
    obstacle: str = ""


class Scheduler:
    """Chooses a layout per step. One instance on the rank that holds the queue; the others follow its plan.

    ``decisions`` keeps the last ``keep`` of them; ``log`` is called with each.
    """

    def __init__(
        self,
        layout: Layout,
        policy: Policy | None = None,
        *,
        keep: int = 4096,
        log: Callable[[Decision], Any] | None = None,
    ):
        self.layout = layout
        self.policy = policy or Policy()
        self.decisions: deque[Decision] = deque(maxlen=keep)
        self._log = log
        self._step = 0
        self._free_at = 0  # the first step at which the dwell is over

    def decide(self, candidates: Mapping[str, Candidate]) -> Decision:
        """Choose among ``candidates`` by layout name, which include the current layout, and count one step.

        Raises ValueError when the current layout or a forced one is not among them.
        """
        for name in filter(None, (self.layout.name, self.policy.forced)):
            if name not in candidates:
                raise ValueError(f"no candidate for layout {name}; there are {', '.join(candidates) or 'none'}")
        previous = self.layout.name
        wish = self._wish(candidates)
        action = STAY if wish.layout == previous else DEFER if wish.obstacle else SWITCH
        decision = Decision(
            step=self._step,
            action=action,
            layout=wish.layout if action == SWITCH else previous,
            previous=previous,
            wanted=wish.layout,
            reason=wish.obstacle or wish.reason,
            seconds={name: each.seconds for name, each in candidates.items()},
            misfits={name: each.misfit for name, each in candidates.items() if each.misfit},
            lead=1 - candidates[wish.layout].seconds / candidates[previous].seconds,
            required=wish.required,
        )
        self._step += 1
        if action == SWITCH:
            self.layout = layout_named(wish.layout)
            self._free_at = self._step + self.policy.min_dwell
        self.decisions.append(decision)
        if self._log is not None:
            self._log(decision)
        return decision

    def hold(self, layout: Layout) -> None:
        """Take note that the worker runs in ``layout`` after all, as when it had to defer a switch; no dwell is due."""
        self.layout, self._free_at = layout, self._step

    def _wish(self, candidates: Mapping[str, Candidate]) -> _Wish:
        current = self.layout.name
        if self.policy.forced is not None:
            return self._go(self.policy.forced, candidates, 0.0, "forced")
        by_cost = sorted(candidates, key=lambda name: (candidates[name].seconds, name != current))
        fitting = [name for name in by_cost if not candidates[name].misfit]
        if not fitting:
            return _Wish(current, 0.0, f"no layout holds this batch; in {current}, {candidates[current].misfit}")
        if current not in fitting:  # any layout that can be reached is better than one that cannot hold the batch
            chosen = next((name for name in fitting if not candidates[name].no_passage), fitting[0])
            return self._go(chosen, candidates, 0.0, f"{current} no longer fits: {candidates[current].misfit}")
        now, best = candidates[current].seconds, fitting[0]
        for name in fitting[: fitting.index(current)]:
            lead, required = 1 - candidates[name].seconds / now, self._required(candidates[name], now)
            if lead > required:
                wait = self._free_at - self._step
                if wait > 0:
                    return _Wish(name, required, "", f"{current} is kept for {wait} more steps")
                return self._go(name, candidates, required, f"leads {current} by {lead:.1%}, {required:.1%} asked")
        if best == current:
            return _Wish(current, 0.0, "the cheapest that fits")
        lead, required = 1 - candidates[best].seconds / now, self._required(candidates[best], now)
        return _Wish(current, required, f"{best} leads by {lead:.1%}, {required:.1%} asked")

    def _go(self, name: str, candidates: Mapping[str, Candidate], required: float, reason: str) -> _Wish:
        chosen = candidates[name]
        obstacle = chosen.misfit or (chosen.no_passage if name != self.layout.name else "")
        return _Wish(name, required, reason, obstacle)

    def _required(self, candidate: Candidate, now: float) -> float:
        return max(self.policy.margin, candidate.exposed / (self.policy.payback_steps * now))
