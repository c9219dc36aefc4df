"""What rank 0 tells all ranks before a step, and what the step gives back. No torch here but in annotations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

NO_LOGITS, LAST, ALL = "none", "last", "all"
BLOCKING, LAYER_AHEAD = "blocking", "layer_ahead"


class PlanError(ValueError):
    """A plan that cannot be run. Every rank finds it before it changes anything, so the group lives on."""


@dataclass(frozen=True)
class Chunk:
    """Consecutive new tokens of one request, at positions ``start`` and up.

    A request begins with its first chunk or with a ``Fork``. ``owner`` is the rank that keeps its history under DP and
    DOP; it stays the same until a plan moves it. ``logits``: ``none``, ``last`` (of the last token) or ``all``.
    """

    request: int
    owner: int
    start: int
    tokens: tuple[int, ...]
    logits: str = LAST

    @property
    def rows_asked(self) -> int:
        """Rows of logits that this chunk gives."""
        return {NO_LOGITS: 0, LAST: 1, ALL: len(self.tokens)}[self.logits]


@dataclass(frozen=True)
class Fork:
    """A new request that begins with the first ``tokens`` cached tokens of ``source``, at the same owner.

    Whole pages are shared; a partly filled one is shared while nobody appends to it, and else copied.
    """

    request: int
    source: int
    tokens: int


@dataclass(frozen=True)
class StepPlan:
    """One step, the same on all ranks, applied in the order release, owners, forks, chunks.

    - ``layout``: that of the last step, which must still hold here.
    - ``switch_to``: run this step in that layout; state moves as ``mode`` says, ``layer_ahead`` (each layer while the
      one before it computes) or ``blocking`` (all layers first).
    - ``prepare``: the layout that the next step is to switch to. Its first layer starts to move under this step, and is
      dropped if the next plan decides otherwise.
    - ``release``: requests that are finished or cancelled. ``owners``: (request, new owner) pairs.
    - ``weight_version``: of the weights that must run it.
    - ``experts``: whether the expert choices of every row are wanted.
    """

    step: int
    layout: str
    chunks: tuple[Chunk, ...] = ()
    release: tuple[int, ...] = ()
    switch_to: str | None = None
    weight_version: int = 0
    forks: tuple[Fork, ...] = ()
    owners: tuple[tuple[int, int], ...] = ()
    mode: str = LAYER_AHEAD
    experts: bool = False
    prepare: str | None = None

    @property
    def rows(self) -> int:
        """N, the new tokens of all chunks."""
        return sum(len(chunk.tokens) for chunk in self.chunks)


@dataclass(frozen=True)
class StepResult:
    """What a step computed; the same on every rank but for ``seconds``.

    ``logits``: ``[rows asked for, vocab]`` in chunk order, fp32 (fp64 for an fp64 model). ``experts``: int64
    ``[N, expert layers, top-k]``, ascending expert numbers of each row in chunk order, where the plan asked.
    ``layout``: the one the step ran in. ``switched``: whether state moved. ``deferred``: why a switch or a change of
    owners that was asked for did not happen, else None. ``prepared``: whether the first layer of the next step's switch
    is under way. ``moved_bytes``: what the whole group received in the switch. ``replayed``: whether a CUDA graph ran
    the step; ``eager``: why none did, where there are graphs.
    """

    step: int
    layout: str
    logits: torch.Tensor
    experts: torch.Tensor | None
    seconds: float
    switched: bool = False
    deferred: str | None = None
    prepared: bool = False
    moved_bytes: int = 0
    replayed: bool = False
    eager: str | None = None
