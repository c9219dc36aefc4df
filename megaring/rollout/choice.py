"""Which step to run next: the draft in the present layout, or in another one that is wanted and has room. No torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megaring.rollout.compose import Composer, Draft, Limits
from megaring.rollout.executor import Executor
from megaring.rollout.intake import EngineConfig
from megaring.rollout.layout import OWNERS, Layout, layout_named
from megaring.rollout.owners import rebalance
from megaring.rollout.queues import Queues
from megaring.rollout.steering import Steer, View
from megaring.rollout.step import StepPlan


@dataclass(frozen=True, eq=False)
class Choice:
    """A draft, the plan of it, and why a layout that was wanted for it is not taken, or None."""

    draft: Draft
    plan: StepPlan
    deferred: str | None = None


class Chooser:
    """Chooses for one engine. Nothing changes by it."""

    def __init__(self, executor: Executor, queues: Queues, config: EngineConfig, steer: Steer | None) -> None:
        self._executor, self._queues, self._config, self._steer = executor, queues, config, steer
        self._limits = Limits(config.max_rows, config.max_running, config.max_logits, config.expected_growth)

    def choose(self, step: int) -> Choice:
        """The next step; without chunks, nothing can run in any layout that can be reached."""
        draft, deferred = self._draft(step)
        return Choice(draft, self._with_moves(self._plan(step, draft)), deferred)

    def release_only(self, step: int) -> Choice:
        """A step that only gives back what ended sequences held."""
        draft = Draft(self._executor.layout)
        return Choice(draft, self._plan(step, draft))

    def _draft(self, step: int) -> tuple[Draft, str | None]:
        here = self._executor.layout
        draft = self._compose(here)
        if not draft.chunks:  # nobody fits here even alone: any layout that has room is right
            others = (layout_named(name) for name in self._config.layouts if name != here.name)
            drafts = (each for each in map(self._compose, others) if each.chunks)
            return next((each for each in drafts if not self._obstacle(step, each)), draft), None
        if self._steer is None:
            return draft, None
        view = View(step, here, draft, self._executor.ledger, self._gone(draft))
        wanted = layout_named(self._steer(view))
        if wanted is here:
            return draft, None
        if wanted.name not in self._config.layouts:
            return draft, f"{wanted} is not among the layouts of this worker, {', '.join(self._config.layouts)}"
        other = self._compose(wanted)
        stopped = [each for each in draft.work if each.history is not None and each not in other.work]
        if stopped:
            return draft, f"{wanted} has no room for {len(stopped)} sequences that run on in {here}"
        obstacle = self._obstacle(step, other)
        return (draft, obstacle) if obstacle else (other, None)

    def _compose(self, layout: Layout) -> Draft:
        executor = self._executor
        total = executor.total_pages(layout)
        return Composer(self._queues, executor.ledger, self._limits, layout, total, executor.weight_version).draft()

    def _obstacle(self, step: int, draft: Draft) -> str | None:
        return self._executor.shortage(self._plan(step, draft))

    def _gone(self, draft: Draft) -> tuple[int, ...]:
        return (*self._queues.release, *draft.evicted, *(each.history for each in draft.preempted))

    def _plan(self, step: int, draft: Draft) -> StepPlan:
        here = self._executor.layout
        return StepPlan(
            step=step,
            layout=here.name,
            chunks=draft.chunks,
            release=self._gone(draft),
            switch_to=draft.layout.name if draft.layout is not here else None,
            weight_version=self._executor.weight_version,
            forks=draft.forks,
            mode=self._config.switch_mode,
            experts=any(each.request.params.experts for each in draft.work),
        )

    def _with_moves(self, plan: StepPlan) -> StepPlan:
        """The plan with new owners for some histories, where that evens them out and has room."""
        every, layout = self._config.rebalance_every, layout_named(plan.switch_to or plan.layout)
        if not every or plan.step % every or layout.history != OWNERS or plan.forks:
            return plan
        ledger = self._executor.ledger
        moved = rebalance(ledger.histories(without=plan.release), ledger.ranks)
        chunks = tuple(replace(each, owner=moved.get(each.request, each.owner)) for each in plan.chunks)
        changed = replace(plan, owners=tuple(sorted(moved.items())), chunks=chunks)
        return plan if not moved or self._executor.shortage(changed) else changed
