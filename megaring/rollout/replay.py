"""The scheduler on costs that are given: what it would have chosen, and how much of the possible gain that realises."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megaring.rollout.layout import layout_named
from megaring.rollout.scheduler import Candidate, Decision, Policy, Scheduler


def replay(costs: Sequence[Mapping[str, float]], policy: Policy, start: str | None = None) -> list[Decision]:
    """Decisions over steps whose cost in seconds is given by layout; switches are free and everything fits.

    ``start`` is the layout before the first step; None for the cheapest of that step.
    """
    if not costs:
        return []
    scheduler = Scheduler(layout_named(start or min(costs[0], key=costs[0].__getitem__)), policy)
    return [scheduler.decide({name: Candidate(seconds) for name, seconds in step.items()}) for step in costs]


@dataclass(frozen=True)
class Gain:
    """Seconds over a series of steps: as chosen, of every fixed layout, and of a free and perfect switcher."""

    chosen: float
    fixed: Mapping[str, float]
    ideal: float

    @property
    def best_fixed(self) -> str:
        """The fixed layout that needs least time overall."""
        return min(self.fixed, key=self.fixed.__getitem__)

    @property
    def possible(self) -> float:
        """How many times as fast as the best fixed layout a perfect switcher is."""
        return self.fixed[self.best_fixed] / self.ideal

    @property
    def realised(self) -> float:
        """The share of the ideal saving over the best fixed layout that was made; 1 where there is none to make."""
        saving = self.fixed[self.best_fixed] - self.ideal
        return (self.fixed[self.best_fixed] - self.chosen) / saving if saving > 0 else 1.0


def gain(costs: Sequence[Mapping[str, float]], chosen: Sequence[str]) -> Gain:
    """Compare the layouts ``chosen`` step by step with what the ``costs`` made possible."""
    if not costs or len(costs) != len(chosen):
        raise ValueError(f"{len(chosen)} choices for {len(costs)} steps; give one for each of at least one step")
    return Gain(
        chosen=sum(step[name] for step, name in zip(costs, chosen, strict=True)),
        fixed={name: sum(step[name] for step in costs) for name in costs[0]},
        ideal=sum(min(step.values()) for step in costs),
    )
