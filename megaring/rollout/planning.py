"""What ``megaring rollout plan`` computes: capacity and step time of every layout, and every switch between two."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from megaring.errors import UserError
from megaring.rollout.assess import Group, Passage, misfit, passage
from megaring.rollout.blocks import History, PageTable
from megaring.rollout.calibration import Calibration
from megaring.rollout.cost import Batch, Stages, step_stages
from megaring.rollout.footprint import Admission, Shortage, Sizes, admission, kv_rank_bytes, switch_shortage
from megaring.rollout.layout import LAYOUTS, PAGE, SWITCHES, Layout, pages_of
from megaring.rollout.shape import ModelShape

GIB = 2**30
_MOST_PAGES = 1 << 22  # of the batch: 268 M tokens; more take minutes and gigabytes to enumerate


@dataclass(frozen=True)
class Question:
    """A batch on a group of GPUs. ``usable``: bytes of a rank for weights, KV and ``reserve``, which stays free.

    ``requests`` requests of ``context`` cached tokens each decode one token; with ``chunk``, the last of them prefills
    that many instead.
    """

    shape: ModelShape
    ranks: int
    requests: int
    context: int
    usable: int
    reserve: int
    calibration: Calibration
    chunk: int = 0


@dataclass(frozen=True, eq=False)
class LayoutPlan:
    """One layout. Bytes are those of the fullest rank; ``misfit`` is why the batch does not fit, or empty."""

    layout: Layout
    weights: int
    kv: int
    misfit: str
    longest_context: int
    admitted: Admission
    stages: Stages


@dataclass(frozen=True, eq=False)
class SwitchPlan:
    """One switch in the step in question. ``obstacle`` is why it has no room, or empty."""

    passage: Passage
    obstacle: str
    repaid: float | None  # steps until the exposed transfer is earned back; None where the destination is no faster


@dataclass(frozen=True, eq=False)
class Plan:
    """Everything that the command prints. ``common``: bytes of weights outside the layouts on each rank."""

    question: Question
    common: int
    layouts: Mapping[str, LayoutPlan]
    switches: tuple[SwitchPlan, ...]

    @property
    def fastest(self) -> str | None:
        """The layout with the shortest step of those that fit, or None where none does."""
        fitting = [name for name, each in self.layouts.items() if not each.misfit]
        return min(fitting, key=lambda name: self.layouts[name].stages.seconds, default=None)


def make_plan(question: Question) -> Plan:
    """Work everything out. Raises UserError where the model cannot be on these ranks at all, with the arithmetic."""
    shape, ranks = question.shape, question.ranks
    try:
        shape.check_ranks(ranks)
    except ValueError as error:
        raise UserError(str(error)) from None
    common = common_bytes(shape, ranks)
    _check(question, common)
    group = Group(shape, ranks, question.usable - common, question.reserve, question.calibration.constants)
    histories = [History(i, i % ranks, question.context) for i in range(question.requests)]
    table = PageTable.from_histories(histories, ranks)
    layouts = {name: _layout(group, layout, question, table) for name, layout in LAYOUTS.items()}
    switches = []
    for source, destination in SWITCHES:
        before, after = (layouts[each.name].stages.seconds for each in (source, destination))
        way = passage(group, source, destination, table, after)
        repaid = way.exposed / (before - after) if after < before else None
        short = switch_shortage(way.manifest, group.memory, group.reserve)
        switches.append(SwitchPlan(way, _obstacle(layouts, source, destination, short), repaid))
    return Plan(question, common, layouts, tuple(switches))


def common_bytes(shape: ModelShape, ranks: int) -> int:
    """M_0 of SPLASH, equation 6, as far as it is weights: what every layout has on each rank, in bytes.

    MLPs, embedding and output layer are cut T ways, experts are dealt whole, MLA's down projections are replicated.
    """
    elements = shape.layers * shape.replicated_elements
    if shape.feed_forward is not None:
        elements += -(-shape.feed_forward.stored(shape.hidden, shape.layers) // ranks)
    return elements * shape.weight_bytes


def _layout(group: Group, layout: Layout, question: Question, table: PageTable) -> LayoutPlan:
    sizes, room = Sizes.of(group.shape, group.ranks), group.memory - group.reserve
    rows = np.ones(question.requests, np.int64)
    context = np.full(question.requests, question.context + 1)
    if question.chunk:
        rows[-1], context[-1] = question.chunk, question.context + question.chunk
    batch = Batch(np.arange(question.requests) % group.ranks, context, rows)
    return LayoutPlan(
        layout=layout,
        weights=int(sizes.weight_bytes(layout)),
        kv=max(kv_rank_bytes(group.shape, layout, table)),
        misfit=misfit(group, layout, table),
        longest_context=int(sizes.longest_context(layout, room, question.requests)),
        admitted=admission(layout, group.ranks, sizes.pool_tokens(layout, room), question.context),
        stages=step_stages(group.shape, layout, group.ranks, batch, group.constants),
    )


def _obstacle(layouts: Mapping[str, LayoutPlan], source: Layout, destination: Layout, short: Shortage | None) -> str:
    for end in (source, destination):
        if layouts[end.name].misfit:
            return f"{end} does not hold this batch"
    return str(short) if short else ""


def _check(question: Question, common: int) -> None:
    shape, ranks = question.shape, question.ranks
    least = common + question.reserve + min(Sizes.of(shape, ranks).weight_bytes(layout) for layout in LAYOUTS.values())
    if least >= question.usable:
        raise UserError(
            f"{shape.name} does not fit on {ranks} ranks: each would hold {common / GIB:.1f} GiB of weights outside "
            f"attention, at least {(least - common - question.reserve) / GIB:.1f} of projections and "
            f"{question.reserve / GIB:.1f} reserve, and has {question.usable / GIB:.1f} usable. Use more ranks, "
            "a lower precision, fewer layers, or GPUs with more memory"
        )
    pages = question.requests * pages_of(question.context)
    if pages > _MOST_PAGES:
        raise UserError(
            f"a batch of {question.requests:,} x {question.context:,} tokens is {pages:,} pages of {PAGE}; this "
            f"command enumerates at most {_MOST_PAGES:,}. Use a smaller batch or context"
        )
