"""Drive a worker of T ranks from rank 0: the engine's executor there, a loop that follows on the others.

Rank 0 broadcasts every command; all ranks carry it out. Waits are bounded by the timeout of the process group, also
those of idle followers: call ``heartbeat`` more often than that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megaring.rollout.layout import Layout
from megaring.rollout.ledger import Ledger
from megaring.rollout.runner import Runner
from megaring.rollout.step import PlanError, StepPlan, StepResult

_STEP, _REFIT, _SLEEP, _WAKE, _BEAT, _STOP = "step", "refit", "sleep", "wake", "beat", "stop"

Load = Callable[[int], None]
"""Writes the weights of a version into this rank's parameters, in place. May be collective over the worker's ranks."""


class Driver:
    """Rank 0 of a worker, as the engine sees it (see ``executor.Executor``). Without followers it serves one process.

    ``load``: as given to ``follow`` on the other ranks.
    """

    def __init__(self, runner: Runner, load: Load | None = None) -> None:
        if runner.ranks.rank:
            raise ValueError(f"rank 0 drives a worker; this is rank {runner.ranks.rank}, which follows")
        self._runner, self._load = runner, load
        self._version = runner.weight_version

    @property
    def ledger(self) -> Ledger:
        """Which tokens are cached in which pages."""
        return self._runner.ledger

    @property
    def layout(self) -> Layout:
        """The present one."""
        return self._runner.layout

    @property
    def vocab_size(self) -> int:
        """Columns of the logits."""
        return self._runner.vocab_size

    @property
    def weight_version(self) -> int:
        """That of the weights in use, or, asleep, of those to be used."""
        return self._version

    def total_pages(self, layout: Layout) -> NDArray[np.int64]:
        """Pages, each over all layers, that every rank has room for under ``layout``, ``[ranks]``."""
        return self._runner.total_pages(layout)

    def shortage(self, plan: StepPlan) -> str | None:
        """Why a plan, or the switch or change of owners in it, has no room now, or None. Changes nothing."""
        return self._runner.shortage(plan)

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step. After a PlanError all is as it was; any other error leaves the worker unusable."""
        return self._do(_STEP, plan)

    def refit(self, version: int) -> None:
        """Load the weights of ``version`` and rebuild what depends on them."""
        self._do(_REFIT, version)
        self._version = version

    def sleep(self) -> None:
        """Give up the memory of KV pages and replicated projections; no request may be live."""
        self._do(_SLEEP, None)

    def wake(self) -> None:
        """Take the memory back, in the layout before ``sleep``."""
        self._do(_WAKE, self._version)

    def heartbeat(self) -> None:
        """Tell idle followers to go on waiting."""
        self._do(_BEAT, None)

    def stop(self) -> None:
        """End the followers' loops."""
        self._do(_STOP, None)

    def _do(self, name: str, argument: Any) -> Any:
        self._runner.ranks.broadcast((name, argument))
        return _carry_out(self._runner, self._load, name, argument)


def follow(runner: Runner, load: Load | None = None) -> None:
    """Carry out what rank 0 says until it says stop; on every other rank. Raises PeerLost when rank 0 is gone."""
    if not runner.ranks.rank:
        raise ValueError("rank 0 drives a worker; it cannot follow")
    while True:
        name, argument = runner.ranks.broadcast(None)
        if name == _STOP:
            return
        try:
            _carry_out(runner, load, name, argument)
        except PlanError:
            continue  # rank 0 has the same one and reports it; nothing has changed


def _carry_out(runner: Runner, load: Load | None, name: str, argument: Any) -> Any:
    if name == _STEP:
        return runner.step(argument)
    if name == _REFIT:
        if load is None:
            raise ValueError("this worker was started without a way to load weights; pass load to Driver and follow")
        load(argument)
        if not runner.asleep:
            runner.refit(argument)
    elif name == _SLEEP:
        runner.sleep()
    elif name == _WAKE:
        runner.wake(argument)
    return None
