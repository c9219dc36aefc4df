"""Decide about switches, for all ranks alike, and keep the one that is prepared."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from megaring.rollout.blocks import PageTable
from megaring.rollout.checks import growth
from megaring.rollout.layout import Layout, layout_named
from megaring.rollout.ledger import Ledger
from megaring.rollout.manifest import make_manifest
from megaring.rollout.ranks import Ranks
from megaring.rollout.room import Room
from megaring.rollout.shape import ModelShape
from megaring.rollout.step import BLOCKING, PlanError, StepPlan
from megaring.rollout.switch import State, Switch


class Switcher:
    """Makes the switches of one rank. A prepared one has its first layer in transit from one step to the next."""

    def __init__(self, shape: ModelShape, ranks: Ranks, ledger: Ledger, room: Room, state: State) -> None:
        self._shape, self._ranks, self._ledger, self._room, self._state = shape, ranks, ledger, room, state
        self.prepared: Switch | None = None

    def look(self, plan: StepPlan, layout: Layout) -> tuple[Switch | None, str | None]:
        """The switch or change of owners of a plan, if it has one and there is room; else what it or the step lacks.
        Changes nothing.
        """
        destination = layout_named(plan.switch_to) if plan.switch_to else layout
        if destination is layout and not plan.owners:
            return None, self._step_shortage(plan, layout)
        added = growth(plan, self._ledger, destination, moved=True)
        return self._make(layout, destination, added, plan.owners, plan.release)

    def decide(self, plan: StepPlan, layout: Layout) -> tuple[Switch | None, str | None]:
        """The switch of this step, agreed by all ranks, or why it waits; collective.

        Raises PlanError for a step without room. A prepared switch is taken if the plan goes on with it, else undone.
        """
        prepared = self.prepared
        if prepared is not None and self._goes_on(plan, prepared):
            self.prepared = None
            return prepared, None
        self.undo()
        switch, deferred = self.look(plan, layout)
        if switch is not None:
            self._agree(switch)
            return switch, None
        shortage = self._step_shortage(plan, layout)
        if shortage:
            raise PlanError(f"step {plan.step} does not fit: {shortage}. Release a request or plan fewer tokens")
        return None, deferred

    def prepare(self, layout: Layout, destination: Layout) -> bool:
        """Start on the switch of the next step, as soon as the first layer has appended this step's tokens; collective.

        Returns whether there was room for it.
        """
        switch, _ = self._make(layout, destination, np.zeros(self._ranks.size, np.int64))
        if switch is None:
            return False
        self._agree(switch)
        switch.launch(0)
        self.prepared = switch
        return True

    def undo(self) -> None:
        """Give up the prepared switch, if there is one; collective."""
        if self.prepared is not None:
            self.prepared.cancel(0)
            self.prepared = None

    def start_in(self, layout: Layout, destination: Layout) -> None:
        """Move the projections, before there is any request. Raises ValueError if they do not fit."""
        switch, shortage = self._make(layout, destination, np.zeros(self._ranks.size, np.int64))
        if switch is None:
            raise ValueError(f"{destination} does not fit: {shortage}. Give the arena more memory")
        switch.complete()

    def _make(
        self,
        layout: Layout,
        destination: Layout,
        added: NDArray[np.int64],
        owners: Iterable[tuple[int, int]] = (),
        release: Iterable[int] = (),
    ) -> tuple[Switch | None, str | None]:
        before = self._ledger.histories(without=release)
        after = self._ledger.histories(owners, without=release)
        tables = [PageTable.from_histories(each, self._ranks.size) for each in (before, after)]
        manifest = make_manifest(self._shape, layout, destination, *tables)
        shortage = self._room.switch_shortage(manifest, added)
        if shortage:
            return None, shortage
        return Switch(manifest, self._ledger.slots_of(tables[0]), self._state), None

    def _goes_on(self, plan: StepPlan, prepared: Switch) -> bool:
        destination = prepared.manifest.destination
        if plan.switch_to != destination.name or plan.owners or plan.mode == BLOCKING or not plan.chunks:
            return False
        added = growth(plan, self._ledger, destination, moved=True)
        return self._room.switch_shortage(prepared.manifest, added) is None

    def _agree(self, switch: Switch) -> None:
        manifest = switch.manifest
        self._ranks.check_equal(manifest.digest, f"the manifest from {manifest.source} to {manifest.destination}")

    def _step_shortage(self, plan: StepPlan, layout: Layout) -> str | None:
        """Why a plan has no room in the present layout, without its switch, or None."""
        added = growth(plan, self._ledger, layout, moved=False)
        return self._room.shortage(layout, self._ledger.pages_held(layout, plan.release) + added)
