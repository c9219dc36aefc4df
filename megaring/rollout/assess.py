"""The scheduler's candidates, made from an actual batch: cost of each layout, whether it fits, and the way there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megaring.rollout.blocks import History, PageTable
from megaring.rollout.calibration import Constants
from megaring.rollout.cost import Batch, exposed_transfer, step_stages, transfer_seconds
from megaring.rollout.footprint import rank_bytes, switch_shortage
from megaring.rollout.layout import LAYOUTS, PAGE, Layout
from megaring.rollout.manifest import Manifest, make_manifest
from megaring.rollout.scheduler import Candidate
from megaring.rollout.shape import ModelShape


@dataclass(frozen=True)
class Group:
    """What a worker group is made of.

    ``memory`` is what each rank has for projections and KV, in bytes: device memory without common weights, scratch and
    graphs (M_0, A and the device's own use in SPLASH, equation 6). ``reserve`` is kept free of it.
    """

    shape: ModelShape
    ranks: int
    memory: int
    reserve: int
    constants: Constants


@dataclass(frozen=True, eq=False)
class Passage:
    """A switch with its times: per-layer ``transfer``, and what is exposed overlapped and ``blocking``, in seconds."""

    manifest: Manifest
    transfer: float
    exposed: float
    blocking: float


def misfit(group: Group, layout: Layout, table: PageTable) -> str:
    """Why ``layout`` cannot hold the batch in steady state on every rank (equation 6), or an empty string."""
    used = rank_bytes(group.shape, layout, table)
    rank = int(np.argmax(used))
    if used[rank] + group.reserve <= group.memory:
        return ""
    gib = 2**30
    return (
        f"rank {rank} would hold {used[rank] / gib:.2f} GiB of projections and KV + {group.reserve / gib:.2f} reserve, "
        f"and has {group.memory / gib:.2f}"
    )


def passage(
    group: Group,
    source: Layout,
    destination: Layout,
    table: PageTable,
    step_seconds: float,
    after: PageTable | None = None,
    *,
    early: bool = True,
) -> Passage:
    """A switch in a step that would take ``step_seconds`` with its target ready, every layer an equal part.

    ``early``: the first layer's transfer runs under the step before, whose other layers it can hide behind.
    """
    manifest = make_manifest(group.shape, source, destination, table, after)
    layers, moved = group.shape.layers, transfer_seconds(manifest, group.constants)
    compute = max(0.0, step_seconds - group.constants.step_overhead) / layers
    hidden = (layers - 1) * compute if early else 0.0
    exposed = exposed_transfer([moved] * layers, [compute] * layers, hidden)
    return Passage(manifest, moved, exposed, layers * moved)


def candidates(
    group: Group,
    current: Layout,
    histories: Sequence[History],
    rows: Sequence[int],
    *,
    forced: str | None = None,
    early: bool = True,
) -> dict[str, Candidate]:
    """Every layout as a candidate for a step in which request i, with ``histories[i]`` cached, adds ``rows[i]`` rows.

    A layout fits if the histories fit as they will be after the step. Requests without rows (waiting in the arena)
    count for memory only. The way to a layout is worked out where it may be taken: where the layout is cheaper than
    the current one, ``forced``, or the current one does not fit; elsewhere its exposure reads 0. That keeps most steps
    free of the work of planning a switch, a millisecond for every 8,000 pages.
    """
    grown = [_grown(each, added) for each, added in zip(histories, rows, strict=True)]
    later = PageTable.from_histories(grown, group.ranks)
    active = [(each.owner, each.length, added) for each, added in zip(grown, rows, strict=True) if added]
    batch = Batch(*np.array(active, np.int64).reshape(-1, 3).T)
    costs = {
        name: step_stages(group.shape, layout, group.ranks, batch, group.constants).seconds
        for name, layout in LAYOUTS.items()
    }
    misfits = {name: misfit(group, layout, later) for name, layout in LAYOUTS.items()}
    made = {name: Candidate(costs[name], misfits[name]) for name in LAYOUTS}
    wanted = [
        name
        for name in LAYOUTS
        if name != current.name and not misfits[name]
        if costs[name] < costs[current.name] or misfits[current.name] or name == forced
    ]
    table = PageTable.from_histories(histories if wanted else [], group.ranks)
    for name, layout in ((name, LAYOUTS[name]) for name in wanted):
        way = passage(group, current, layout, table, costs[name], early=early)
        short = switch_shortage(way.manifest, group.memory, group.reserve)
        made[name] = Candidate(costs[name], "", way.exposed, str(short) if short else "")
    return made


def _grown(history: History, rows: int) -> History:
    """The history after ``rows`` more tokens; a partly filled page that it shared has become its own."""
    whole = history.origins[: history.length // PAGE] if rows else history.origins
    return History(history.request, history.owner, history.length + rows, whole)
