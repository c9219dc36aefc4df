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
from megaring.rollout.step import LAYER_AHEAD, StepPlan


@dataclass(frozen=True, eq=False)
class Choice:
    """A draft, the plan of it, and why a layout that was wanted for it is not taken, or None."""

    draft: Draft
    plan: StepPlan
    deferred: str | None = None


class Chooser:
    """Chooses for one engine, and remembers a switch that it has had prepared."""

    def __init__(self, executor: Executor, queues: Queues, config: EngineConfig, steer: Steer | None) -> None:
        self._executor, self._queues, self._config, self._steer = executor, queues, config, steer
        self._prepared: Layout | None = None
        self._limits = Limits(config.max_rows, config.max_running, config.max_logits, config.expected_growth)

    def choose(self, step: int) -> Choice:
        """The next step; without chunks, nothing can run in any layout that can be reached."""
        here, prepared, self._prepared = self._executor.layout, self._prepared, None
        draft = self._compose(here)
        if not draft.chunks:  # nobody fits here even alone: any layout that has room is right
            draft = self._elsewhere(step) or draft
            return Choice(draft, self._plan(step, draft))
        wanted = prepared or self._ask(step, draft)
        other, deferred = self._compose_in(wanted, step, draft) if wanted is not here else (None, None)
        if other is None:
            return Choice(draft, self._with_moves(self._plan(step, draft)), deferred)
        if prepared or not self._prepares:
            return Choice(other, self._with_moves(self._plan(step, other)))
        self._prepared = wanted
        return Choice(draft, replace(self._plan(step, draft), prepare=wanted.name))

    def release_only(self, step: int) -> Choice:
        """A step that only gives back what ended sequences held."""
        draft = Draft(self._executor.layout)
        return Choice(draft, self._plan(step, draft))

    @property
    def _prepares(self) -> bool:
        return self._config.prepare_switches and self._config.switch_mode == LAYER_AHEAD

    def _ask(self, step: int, draft: Draft) -> Layout:
        """The layout that is wanted for a step that would run here as in ``draft``."""
        here = self._executor.layout
        if self._steer is None:
            return here
        return layout_named(self._steer(View(step, here, draft, self._executor.ledger, self._gone(draft))))

    def _elsewhere(self, step: int) -> Draft | None:
        """A draft in another layout that can be reached, for a batch of which nothing can run here."""
        here = self._executor.layout
        others = (layout_named(name) for name in self._config.layouts if name != here.name)
        drafts = (each for each in map(self._compose, others) if each.chunks)
        return next((each for each in drafts if not self._obstacle(step, each)), None)

    def _compose_in(self, wanted: Layout, step: int, draft: Draft) -> tuple[Draft | None, str | None]:
        """The step in another layout, or None and why it cannot run there."""
        if wanted.name not in self._config.layouts:
            return None, f"{wanted} is not among the layouts of this worker, {', '.join(self._config.layouts)}"
        other = self._compose(wanted)
        running = [each for each in draft.work if each.history is not None or not other.chunks]
        stopped = [each for each in running if each not in other.work]
        if stopped:
            return None, f"{wanted} has no room for {len(stopped)} sequences that run in {draft.layout}"
        obstacle = self._obstacle(step, other)
        return (None, obstacle) if obstacle else (other, None)

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
