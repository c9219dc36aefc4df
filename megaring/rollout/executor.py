"""What the engine needs of whoever runs its plans: one process, or T ranks behind a driver."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from megaring.rollout.layout import Layout
from megaring.rollout.ledger import Ledger
from megaring.rollout.step import StepPlan, StepResult


class Executor(Protocol):
    """Runs plans and knows the pages.

    ``ledger``: which tokens are cached in which pages; it changes in ``execute`` only. ``layout``: the present one.
    ``vocab_size``: columns of the logits. ``weight_version``: of the weights in use.
    """

    ledger: Ledger
    layout: Layout
    vocab_size: int
    weight_version: int

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step. Any error but PlanError leaves the executor unusable."""

    def total_pages(self, layout: Layout) -> NDArray[np.int64]:
        """Pages, each over all layers, that every rank has room for under ``layout``, ``[ranks]``."""

    def shortage(self, plan: StepPlan) -> str | None:
        """Why ``plan``, or the switch or change of owners in it, has no room now, or None. Changes nothing."""

    def refit(self, version: int) -> None:
        """Put the weights of ``version`` in place, awake or asleep."""

    def sleep(self) -> None:
        """Give up the memory of KV pages and replicated projections; no history is left then."""

    def wake(self) -> None:
        """Take the memory back, in the layout before ``sleep``."""

    def heartbeat(self) -> None:
        """Called now and then while there is nothing to run, so that a bounded wait elsewhere does not run out."""
