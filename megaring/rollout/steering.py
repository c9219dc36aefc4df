"""Who says which layout the next step runs in: the scheduler, a fixed choice, or each layout in turn. No torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from megaring.rollout.assess import Group, candidates
from megaring.rollout.blocks import History
from megaring.rollout.compose import Draft
from megaring.rollout.layout import LAYOUTS, PAGE, Layout, layout_named, pages_of
from megaring.rollout.ledger import Ledger
from megaring.rollout.scheduler import Scheduler

_IDENTITIES = 1 << 32  # pages are named by numbers from here, so that none is also the number of a history


@dataclass(frozen=True, eq=False)
class View:
    """The next step as it would run in the present ``layout``: ``draft`` over the histories in ``ledger``, of which
    ``gone`` are given back.
    """

    step: int
    layout: Layout
    draft: Draft
    ledger: Ledger
    gone: tuple[int, ...]

    @cached_property
    def histories(self) -> list[History]:
        """The cached tokens that the step begins with, also of histories that get no rows in it."""
        found = {
            each.request: History(each.request, each.owner, each.length, tuple(_IDENTITIES + i for i in each.origins))
            for each in self.ledger.histories(without=self.gone)
        }
        for fork in self.draft.forks:
            source = found[fork.source]
            shared = source.origins[: pages_of(fork.tokens)]
            # A partly filled page that the source has more tokens of is copied at once, so it is the fork's own.
            whole = shared if fork.tokens == source.length else shared[: fork.tokens // PAGE]
            found[fork.request] = History(fork.request, source.owner, fork.tokens, whole)
        for chunk in self.draft.chunks:
            found.setdefault(chunk.request, History(chunk.request, chunk.owner, 0))
        return list(found.values())

    @property
    def rows(self) -> list[int]:
        """New tokens of each of ``histories`` in the step."""
        rows = {chunk.request: len(chunk.tokens) for chunk in self.draft.chunks}
        return [rows.get(each.request, 0) for each in self.histories]


Steer = Callable[[View], str]
"""Names the layout to run in. The engine asks before every step that has rows, unless it has a switch prepared, and
follows if the switch has room and stops nobody who could run on without it."""


def by_cost(group: Group, scheduler: Scheduler) -> Steer:
    """Follow a scheduler, on what the cost model says of every layout."""

    def steer(view: View) -> str:
        if scheduler.layout is not view.layout:  # a switch had to wait, or was made for want of room
            scheduler.hold(view.layout)
        forced = scheduler.policy.forced
        return scheduler.decide(candidates(group, view.layout, view.histories, view.rows, forced=forced)).layout

    return steer


def in_turn(every: int) -> Steer:
    """All four layouts, each for ``every`` steps: to see switches, not to be fast."""
    if every < 1:
        raise ValueError(f"layouts in turn, every {every} steps; it is at least 1")
    names = list(LAYOUTS)
    return lambda view: names[view.step // every % len(names)]


def fixed(name: str) -> Steer:
    """One layout. Raises ValueError for a name that there is not."""
    layout = layout_named(name)
    return lambda view: layout.name
