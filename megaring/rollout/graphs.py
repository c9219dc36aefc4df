"""CUDA graphs of decode steps: one for each layout, batch bucket and width of the block tables, captured when it is
first wanted and replayed from buffers that stay where they are.

On one rank, where all layouts keep every page and head. A bucket's spare rows have no tokens: they append nothing,
attend to nothing, and nobody reads their logits.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from megaring.rollout.attention.gqa import EFFECTIVE
from megaring.rollout.attention.segments import Segments, Singles
from megaring.rollout.layout import PAGE, Layout
from megaring.rollout.ledger import Ledger
from megaring.rollout.pages import Pages
from megaring.rollout.projections import REPLICATED
from megaring.rollout.rotary import Rotary, Rotation
from megaring.rollout.step import StepPlan
from megaring.rollout.switch import Switch
from megaring.rollout.targets import Targets
from megaring.rollout.uploads import upload

BUCKETS = (1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, 257, 32))  # rows of a captured step
_LEAST_PAGES = 16  # columns of the block tables; from here on powers of two
_MOST_GRAPHS = 96
_REBUILT = (REPLICATED, EFFECTIVE)  # buffers that come and go with layouts, always in the same place
_log = logging.getLogger(__name__)

Run = Callable[[], torch.Tensor]
Capture = Callable[[Run], tuple[Callable[[], None], torch.Tensor]]


@dataclass(frozen=True, eq=False)
class Buffers:
    """The inputs of one graph, for ``rows`` rows and ``pages`` columns. ``words`` int32 is what a step uploads: tokens,
    cached tokens and positions of the rows, then their slots. ``units`` int32 ``[layers, rows, pages, groups]``;
    ``cos`` and ``sin`` ``[rows, 1, width]``.
    """

    rows: int
    pages: int
    words: torch.Tensor
    units: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor

    @property
    def tokens(self) -> torch.Tensor:
        """int32 ``[rows]``."""
        return self.words[: self.rows]

    @property
    def lengths(self) -> torch.Tensor:
        """Cached tokens, those of this step included, int32 ``[rows]``; 0 for spare rows."""
        return self.words[self.rows : 2 * self.rows]

    @property
    def positions(self) -> torch.Tensor:
        """int32 ``[rows]``."""
        return self.words[2 * self.rows : 3 * self.rows]

    @property
    def slots(self) -> torch.Tensor:
        """int32 ``[rows * pages]``."""
        return self.words[3 * self.rows :]


class FixedSingles(Singles):
    """Singles whose block tables lie in buffers; ``slots`` has the units of all layers."""

    def units(self, pages: Pages, layer: int, groups: range) -> torch.Tensor:
        """Block tables of a layer, int32 ``[rows, pages, groups]``."""
        return self.slots[layer]


class FixedTargets(Targets):
    """Targets on the device alone: ``slots`` has the units of all layers, ``[layers, rows, groups]``."""

    @property
    def device_offsets(self) -> torch.Tensor:
        """int32 ``[rows]``, negative for spare rows."""
        return self.offsets

    def units(self, pages: Pages, layer: int, groups: range) -> torch.Tensor:
        """The units of a layer that the tokens go to, int32 ``[rows, groups]``."""
        return self.slots[layer]


class FixedSegments(Segments):
    """Segments that are singles of fixed shapes only."""

    def __init__(self, singles: Singles) -> None:
        super().__init__((), singles.lengths.device)
        self.singles = singles


class FixedBatch:
    """``batch.Batch`` for one rank from ``Buffers``, everything on the device. Make it where it is captured."""

    def __init__(self, buffers: Buffers) -> None:
        rows, lengths, device = buffers.rows, buffers.lengths, buffers.words.device
        self.counts = [rows]
        self.tokens = buffers.tokens.long()
        self.own = self.by_owner = self.from_owners = self.asked = torch.arange(rows, device=device)
        ends = ((lengths + (PAGE - 1)) // PAGE).cumsum(0, dtype=torch.int32)
        singles = FixedSingles(None, buffers.units, lengths, ends)
        self.all_segments = self.own_segments = self.local_segments = FixedSegments(singles)
        last = buffers.positions // PAGE + self.own * buffers.pages
        units = buffers.units.flatten(1, 2).index_select(1, last)
        offsets = torch.where(lengths > 0, buffers.positions % PAGE, -1).int()
        self.all_targets = self.own_targets = self.local_targets = FixedTargets(self.own, units, offsets)

    def __len__(self) -> int:
        return len(self.own)


class DecodeGraphs:
    """Graphs over one runner's model.

    ``forward(batch, rotary, layout)`` gives logits ``[rows, vocab]``; it is captured. ``capture`` makes a replay of a
    function and the tensor that it fills.
    """

    def __init__(
        self,
        pages: Pages,
        rotation: Rotation,
        dtype: torch.dtype,
        forward: Callable[[FixedBatch, Rotary, Layout], torch.Tensor],
        capture: Capture | None = None,
    ) -> None:
        self._pages, self._rotation, self._dtype, self._forward = pages, rotation, dtype, forward
        self._given, self._capture = capture, capture or _CudaCapture()
        self._places: list[int] = []
        self._graphs: OrderedDict[tuple, tuple[Buffers, Callable[[], None], torch.Tensor]] = OrderedDict()
        self._broken: str | None = None
        self.captured = 0

    def refusal(self, plan: StepPlan, switch: Switch | None) -> str | None:
        """Why a step is not for a graph, or None."""
        if self._broken is not None:
            return self._broken
        if switch is not None or plan.prepare is not None:
            return "switch"
        if plan.experts:
            return "expert choices"
        if any(len(chunk.tokens) > 1 for chunk in plan.chunks):
            return "prefill"
        if not plan.chunks:
            return "no rows"
        return f"more than {BUCKETS[-1]} rows" if len(plan.chunks) > BUCKETS[-1] else None

    def run(self, plan: StepPlan, ledger: Ledger, layout: Layout) -> torch.Tensor | None:
        """Logits of the rows that want them, ``[n, vocab]``, of a step that is not refused; the ledger and this rank's
        tables have its tokens. None, said in the log, where the graph could not be captured.
        """
        rows = next(size for size in BUCKETS if size >= len(plan.chunks))
        slots = [ledger.slots(chunk.request) for chunk in plan.chunks]
        pages = max(_LEAST_PAGES, 1 << (max(map(len, slots)) - 1).bit_length())
        key = (layout.name, rows, pages)
        known = self._graphs.get(key)
        buffers = known[0] if known is not None else self._buffers(rows, pages)
        self._fill(buffers, plan, slots)
        if known is None:
            known = self._make(key, buffers, layout)
            if known is None:
                return None
        self._graphs.move_to_end(key)
        known[1]()
        asked = [row for row, chunk in enumerate(plan.chunks) if chunk.rows_asked]
        found = known[2]
        if asked == list(range(len(asked))):
            return found[: len(asked)].clone()  # the next replay writes there
        return found[upload(np.array(asked, np.int64), found.device)]

    def forget(self) -> None:
        """Drop all graphs: memory that they point into goes away."""
        self._graphs.clear()
        self._capture = self._given or _CudaCapture()  # a pool that has lost its last graph takes no other one

    def follow(self, model: nn.Module) -> None:
        """The weights have been written. Graphs read them where they were, so they go if any of them has moved."""
        kept = [each for name, each in model.named_buffers() if name.rpartition(".")[2] not in _REBUILT]
        places = [each.data_ptr() for each in (*model.parameters(), *kept)]
        if self._places and places != self._places:
            self.forget()
        self._places = places

    def _make(self, key: tuple, buffers: Buffers, layout: Layout) -> tuple | None:
        def run() -> torch.Tensor:
            rotary = Rotary(buffers.cos, buffers.sin, self._rotation.interleaved)
            return self._forward(FixedBatch(buffers), rotary, layout)

        try:
            replay, out = self._capture(run)
        except RuntimeError as error:
            self._broken = f"capture failed: {str(error).splitlines()[0][:200]}"
            _log.warning("decode steps run without CUDA graphs from now on: %s", self._broken)
            return None
        if len(self._graphs) >= _MOST_GRAPHS:
            self._graphs.popitem(last=False)
        self._graphs[key] = (buffers, replay, out)
        self.captured += 1
        return self._graphs[key]

    def _buffers(self, rows: int, pages: int) -> Buffers:
        layers, _, groups = self._pages.table.shape
        device = self._pages.units.device
        cos, sin = self._rotation.tables(0, device, self._dtype)
        return Buffers(
            rows,
            pages,
            torch.zeros(rows * (3 + pages), dtype=torch.int32, device=device),
            torch.zeros((layers, rows, pages, groups), dtype=torch.int32, device=device),
            cos.new_empty((rows, *cos.shape[1:])),
            sin.new_empty((rows, *sin.shape[1:])),
        )

    def _fill(self, buffers: Buffers, plan: StepPlan, slots: list) -> None:
        """Bring the step's inputs into place: one upload, and what is looked up from it."""
        rows, count = buffers.rows, len(plan.chunks)
        words = np.zeros(len(buffers.words), np.int32)
        words[:count] = [chunk.tokens[0] for chunk in plan.chunks]
        starts = np.array([chunk.start for chunk in plan.chunks])
        words[rows : rows + count] = starts + 1
        words[2 * rows : 2 * rows + count] = starts
        table = words[3 * rows :].reshape(rows, buffers.pages)
        for row, each in zip(table, slots, strict=False):
            row[: len(each)] = each
        buffers.words.copy_(upload(words, buffers.words.device), non_blocking=True)
        layers, _, _, groups = buffers.units.shape
        units = buffers.units.view(layers, -1, groups)
        torch.index_select(self._pages.device_table(), 1, buffers.slots, out=units)
        cos, sin = self._rotation.tables(int(starts.max()), buffers.words.device, self._dtype)
        torch.index_select(cos, 0, buffers.positions, out=buffers.cos)
        torch.index_select(sin, 0, buffers.positions, out=buffers.sin)


class _CudaCapture:
    """Captures into one memory pool, since graphs never run at the same time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Run) -> tuple[Callable[[], None], torch.Tensor]:
        # What is made at a first call (compiled kernels, workspaces) cannot be made in a capture. It also computes the
        # step, and so does the replay: a token is appended twice in the same place.
        current, side = torch.cuda.current_stream(), torch.cuda.Stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            run()
        current.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Other threads (a watchdog of NCCL, a server) may call CUDA meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            out = run()
        return graph.replay, out
