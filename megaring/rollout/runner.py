"""Run a Megatron-Core decoder over T ranks, step by step, in the layout that each plan names.

Every rank makes a ``Runner`` over its own part of the model and calls ``step`` with the same plans. No gradients.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear
from numpy.typing import NDArray
from torch import nn

from megaring.backends.precision import wide
from megaring.rollout.arena import Arena
from megaring.rollout.attention.gqa import Gqa
from megaring.rollout.attention.layouts import FORWARD, Layer
from megaring.rollout.attention.mla import Mla
from megaring.rollout.batch import Batch
from megaring.rollout.checks import check_plan
from megaring.rollout.decoder import Decoder
from megaring.rollout.graphs import DecodeGraphs, FixedBatch
from megaring.rollout.layout import TP, Layout, layout_named
from megaring.rollout.ledger import Ledger
from megaring.rollout.pages import EntryShape, Pages
from megaring.rollout.projections import Projections, SlotLayout
from megaring.rollout.ranks import Ranks
from megaring.rollout.room import Room
from megaring.rollout.rotary import Rotary, Rotation
from megaring.rollout.shape import ModelShape
from megaring.rollout.step import BLOCKING, PlanError, StepPlan, StepResult
from megaring.rollout.switch import State, Switch
from megaring.rollout.switching import Switcher


class Runner:
    """One rank of a generation worker.

    ``memory``: bytes of the arena, which holds the attention projections and all KV pages; ``reserve``: bytes of it
    that a switch leaves alone. ``layout``: to begin with. ``vocab_size``: columns of the logits, if the embedding is
    padded. ``weight_version``: of the weights in the model, whose projections move into the arena: from now on change
    parameters in place, then call ``refit``. ``graphs``: whether decode steps replay CUDA graphs, by default on one
    rank with a GPU in bf16; elsewhere they cannot.
    """

    def __init__(
        self,
        model: GPTModel,
        ranks: Ranks,
        *,
        memory: int,
        reserve: int = 0,
        layout: Layout,
        vocab_size: int | None = None,
        weight_version: int = 0,
        graphs: bool | None = None,
    ) -> None:
        model.eval()
        self.ranks, self.weight_version, self.asleep = ranks, weight_version, False
        self.decoder = Decoder(model, ranks, vocab_size)
        dtype = self.decoder.dtype
        attentions = [layer.self_attention for layer in self.decoder.layers]
        down = getattr(attentions[0], "linear_kv_down_proj", None)
        self.shape = ModelShape.from_config(
            self.decoder.config,
            weight_bytes=dtype.itemsize,
            kv_bytes=dtype.itemsize,
            shard_down=isinstance(down, ColumnParallelLinear),
        )
        self.shape.check_ranks(ranks.size)
        entry = EntryShape.of(self.shape, ranks.size)
        unit_bytes = entry.unit_bytes(dtype)
        self.arena = Arena(memory // unit_bytes, unit_bytes, self.decoder.device)
        self.pages = Pages(self.arena, entry, self.shape.layers, dtype)
        modules = [{each.name: getattr(part, each.name) for each in self.shape.projections} for part in attentions]
        slot = SlotLayout.of(self.shape, ranks.size, dtype.itemsize, unit_bytes)
        self.projections = Projections(self.arena, slot, modules, ranks.rank, dtype)
        self.room = Room(self.arena.units, self.shape.layers, entry.groups, slot, -(-reserve // unit_bytes))
        ranks.check_equal(repr((self.room, self.shape)), "the model or the memory of their arenas")
        self.ledger = Ledger(ranks.size)
        self.layout = TP
        self._kinds = self._attention_kinds(attentions)
        self._state = State(ranks, self.arena, self.pages, self.projections)
        self._switcher = Switcher(self.shape, ranks, self.ledger, self.room, self._state)
        self._graphs = self._decode_graphs(graphs)
        self.refit(weight_version)
        if layout is not TP:
            self._switcher.start_in(TP, layout)
            self.layout = layout

    @property
    def vocab_size(self) -> int:
        """Columns of the logits."""
        return self.decoder.vocab_size

    @torch.no_grad()
    def refit(self, version: int) -> None:
        """The parameters have been written: rebuild what depends on them; collective. No step runs until it returns.

        Cached tokens of live requests stay as the old weights made them; release the requests that shall not keep them.
        """
        self.weight_version = None
        self._switcher.undo()
        self.projections.check_adopted()
        self.decoder.check_adopted()
        for kind in self._kinds:
            kind.rebuild()
        if not self.layout.sharded_projections:
            for layer in range(self.shape.layers):
                self.projections.gather(layer, self.ranks)
                self.projections.expose(layer)
        if self._graphs is not None:
            self._graphs.follow(self.decoder.model)
        self.weight_version = version

    def sleep(self) -> None:
        """Give up the arena's memory and all copies of weights. Raises PlanError while requests are live.

        The model keeps its parameters, which may be written in the meantime.
        """
        if self.asleep:
            raise PlanError("the worker sleeps already")
        if self.ledger.requests:
            raise PlanError(f"{len(self.ledger.requests)} requests are live; release them before the worker sleeps")
        self._switcher.undo()
        if self._graphs is not None:
            self._graphs.forget()
        self.weight_version, self.asleep = None, True
        self.projections.leave()
        for kind in self._kinds:
            kind.forget()
        self.arena.give_up()

    def wake(self, version: int) -> None:
        """Take the memory back after ``sleep``, in the layout before it, with weights of ``version``; collective."""
        if not self.asleep:
            raise PlanError("the worker is awake already")
        self.arena.take_back()
        self.projections.enter()
        self.asleep = False
        self.refit(version)

    def total_pages(self, layout: Layout) -> NDArray[np.int64]:
        """Pages, each over all layers, that every rank has room for under ``layout``, ``[ranks]``."""
        return self.room.total_pages(layout)

    def shortage(self, plan: StepPlan) -> str | None:
        """Why a plan, or the switch or change of owners in it, has no room now, or None. Changes nothing."""
        switch, shortage = self._switcher.look(plan, self.layout)
        return shortage if switch is None else None

    @torch.no_grad()
    def step(self, plan: StepPlan) -> StepResult:
        """Run one plan; collective. Raises PlanError, on all ranks alike, for one that cannot be run and leaves all as
        it was; any other error leaves the worker unusable.
        """
        began = time.perf_counter()
        check_plan(plan, self.ledger, self.layout, self.weight_version, self.decoder.vocab_size)
        self.projections.check_adopted()
        self.decoder.check_adopted()
        switch, deferred = self._switcher.decide(plan, self.layout)
        self._release(plan.release, at_once=switch is None or not switch.launched)
        if switch is not None:
            self.layout = switch.manifest.destination
        if deferred is None:
            for request, owner in plan.owners:
                self.ledger.move(request, owner)
        for fork in plan.forks:
            self.ledger.fork(fork.request, fork.source, fork.tokens)
        for chunk in plan.chunks:
            self.ledger.append(chunk.request, chunk.owner, len(chunk.tokens))
        self.pages.reserve_slots(self.ledger.slots_made)
        ran = self._run(plan, switch)
        self.ledger.settle()
        return StepResult(
            plan.step,
            self.layout.name,
            ran.logits,
            ran.experts,
            time.perf_counter() - began,
            switched=switch is not None,
            deferred=deferred,
            prepared=self._switcher.prepared is not None,
            moved_bytes=switch.manifest.total_bytes if switch is not None else 0,
            replayed=ran.replayed,
            eager=ran.eager,
        )

    def _run(self, plan: StepPlan, switch: Switch | None) -> _Ran:
        if switch is not None and (plan.mode == BLOCKING or not plan.chunks):
            switch.complete()
            rest = None
        else:
            rest = switch
        changes = self._changes()
        if not plan.chunks:
            for layer in range(self.shape.layers):
                self._conform(layer, changes)
            decoder = self.decoder
            return _Ran(torch.zeros(0, decoder.vocab_size, dtype=wide(decoder.dtype), device=decoder.device))
        eager = None
        if self._graphs is not None:
            eager = self._graphs.refusal(plan, switch)
            if eager is None:
                for layer in range(self.shape.layers):
                    self._conform(layer, changes)
                logits = self._graphs.run(plan, self.ledger, self.layout)
                if logits is not None:
                    return _Ran(logits, replayed=True)
                eager = self._graphs.refusal(plan, switch)
        return _Ran(*self._forward(plan, rest, changes), eager=eager)

    def _forward(
        self, plan: StepPlan, switch: Switch | None, changes: _Changes
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        decoder, layers = self.decoder, range(self.shape.layers)
        if switch is not None and not switch.launched:
            switch.launch(0)
        batch = Batch(plan, self.ledger, self.ranks.rank, decoder.device)
        rotary = self._kinds[0].rotation.at(batch.positions, batch.largest_position, decoder.dtype)
        if switch is None:  # all tables at once, so that they reach the device at once
            for index in layers:
                self._conform(index, changes)
        chosen = []

        def before(index: int) -> None:
            if switch is not None:
                switch.commit(index)
                if index + 1 < len(layers):
                    switch.launch(index + 1)
                self._conform(index, changes)

        def attended(index: int) -> None:
            if index == 0 and plan.prepare:
                self._switcher.prepare(self.layout, layout_named(plan.prepare))

        def visited(experts: torch.Tensor) -> None:
            if plan.experts:
                top = experts.to(torch.uint8).topk(decoder.config.moe_router_topk, dim=1)
                chosen.append(top.indices.sort(dim=1).values)

        rows = self._through(batch, rotary, self.layout, before, attended, visited)
        experts = torch.stack(chosen, dim=1) if chosen else None
        return decoder.logits(rows[batch.asked]), experts

    def _through(
        self,
        batch: Batch | FixedBatch,
        rotary: Rotary,
        layout: Layout,
        before: Callable[[int], None] = lambda index: None,
        attended: Callable[[int], None] = lambda index: None,
        visited: Callable[[torch.Tensor], None] = lambda experts: None,
    ) -> torch.Tensor:
        """Residual rows ``[N, hidden]`` after all layers; the callbacks see the beginning of a layer, the end of its
        attention, and which experts its rows visited.
        """
        decoder, groups, attend = self.decoder, self._state.groups(layout), FORWARD[layout]
        rows = decoder.embed(batch.tokens)
        for index, module in enumerate(decoder.layers):
            before(index)
            layer = Layer(index, self._kinds[index], self.pages, groups, batch, rotary, self.ranks)
            rows = rows + attend(layer, module.input_layernorm(rows))
            attended(index)
            out, experts = decoder.feed_forward(module, module.pre_mlp_layernorm(rows))
            rows = rows + out
            if experts is not None:
                visited(experts)
        return rows

    def _release(self, requests: Iterable[int], *, at_once: bool) -> None:
        """``at_once``: free the pages now; else each layer's when it has been switched, as they are in transit."""
        for request in requests:
            self.ledger.release(request)
        if requests and at_once:
            changes = self._changes()
            for layer in range(self.shape.layers):
                self._conform(layer, changes)
            self.ledger.settle()

    def _changes(self) -> _Changes:
        """What the ledger wants of every layer's pages under the present layout."""
        slots = np.array(sorted(self.ledger.touched), np.int64)
        held = self.ledger.held(slots, self.layout, self.ranks.rank)
        return _Changes(slots[held], slots[~held], tuple(self.ledger.copies), self._state.groups(self.layout))

    def _conform(self, layer: int, changes: _Changes) -> None:
        """Make one layer's pages what the ledger says they are."""
        if len(changes.held):
            self.pages.allocate(layer, changes.held, changes.groups)
        for source, destination in changes.copies:
            self.pages.copy_page(layer, source, destination)
        if len(changes.gone):
            self.pages.free(layer, changes.gone)

    def _decode_graphs(self, wanted: bool | None) -> DecodeGraphs | None:
        device, dtype = self.decoder.device, self.decoder.dtype
        # torch's grouped product waits for the host in other types.
        able = device.type == "cuda" and self.ranks.size == 1 and dtype == torch.bfloat16
        if wanted and not able:
            raise ValueError(
                f"CUDA graphs are for one rank with a GPU in bf16; this is {self.ranks.size} ranks on {device.type} in "
                f"{str(dtype).removeprefix('torch.')}. Leave them out"
            )
        if not able or wanted is False:
            return None

        def forward(batch: FixedBatch, rotary: Rotary, layout: Layout) -> torch.Tensor:
            return self.decoder.logits(self._through(batch, rotary, layout))

        return DecodeGraphs(self.pages, self._kinds[0].rotation, dtype, forward)

    def _attention_kinds(self, attentions: list[nn.Module]) -> list[Gqa] | list[Mla]:
        if self.shape.mla is not None:
            return [Mla(attention, self.shape, self.ranks) for attention in attentions]
        rotation = Rotation.of(self.decoder.model.rotary_pos_emb)
        return [Gqa(attention, self.shape, self.ranks, rotation) for attention in attentions]


@dataclass(frozen=True, eq=False)
class _Changes:
    """Slots that this rank holds from now on or does not, pages to copy, and the cache head groups of a page."""

    held: NDArray[np.int64]
    gone: NDArray[np.int64]
    copies: tuple[tuple[int, int], ...]
    groups: range


@dataclass(frozen=True, eq=False)
class _Ran:
    """Parts of a ``StepResult``."""

    logits: torch.Tensor
    experts: torch.Tensor | None = None
    replayed: bool = False
    eager: str | None = None
