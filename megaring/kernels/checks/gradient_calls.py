"""A case's forward and backward calls, in poisoned memory: NaN wherever nothing valid is to be read."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch

from buddyring.placement import Placement
from megaring.kernels.arena import ArenaLayout, Domain, LocalDomain
from megaring.kernels.backward_plan import most_slots, plan_backward
from megaring.kernels.checks.calls import Calls, MakeDomain, packed, prepare
from megaring.kernels.compile import build
from megaring.kernels.megaring_backward import BackwardCall, backward_to_device, megaring_backward
from megaring.kernels.specialisations import Specialisation, backward, forward
from megaring.kernels.workspace import Workspace

NAMES = ("dq", "dk", "dv")
LEAST = 0.1  # see gradient_error

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True, eq=False)
class GradientCalls:
    """Backward calls beside the forward calls whose output they differentiate, which have to run first.

    heads_per_task: of the backward launches; None for all query heads that share a KV head.
    """

    forwards: Calls
    calls: list[BackwardCall]
    heads_per_task: int | None

    def run(self, **options) -> None:
        """Launch the backward on the current stream, wait, and raise PeerTimeout when it had to stop."""
        self.launch(**options)
        torch.cuda.synchronize()
        self.forwards.domain.check()

    def launch(self, **options) -> None:
        """Launch the backward on the current stream; ``options`` are those of ``megaring_backward``."""
        scale, heads = self.forwards.scale, self.heads_per_task
        megaring_backward(self.forwards.domain, self.calls, softmax_scale=scale, heads_per_task=heads, **options)

    def poison(self) -> None:
        """NaN in all gradients."""
        for gradient in self._gradients():
            gradient.fill_(float("nan"))

    def copies(self) -> list[torch.Tensor]:
        """Copies of dQ, dK and dV of every call, in turn."""
        return [gradient.clone() for gradient in self._gradients()]

    def spread(self, others: list[torch.Tensor]) -> float:
        """Largest error of a gradient beside its copy in ``others``; the order of additions differs from call to call.

        NaN if any gradient holds one.
        """
        return largest(gradient_error(ours, was) for ours, was in zip(self._gradients(), others, strict=True))

    def fault(self) -> str:
        """What the last call left in a state that it should not have, or nothing."""
        domain = self.forwards.domain
        for call, index in zip(self.calls, self.forwards.tokens, strict=True):
            for name in NAMES:
                if getattr(call, name)[len(index) :].count_nonzero():  # NaN is not zero
                    return f"{name}: rows of no sequence are not cleared"
            if call.workspace.query_sums.count_nonzero() or call.workspace.counters.count_nonzero():
                return "the sums of dQ, or their counters, are not zero again"
        for rank in domain.local:
            if domain.layout.slots and domain.arenas[rank][domain.layout.counts_offset :].count_nonzero():
                return "the sums of dK and dV, or their counts, are not zero again"
        return ""

    def pieces(self) -> Iterator[tuple[int, torch.Tensor, Tensors]]:
        """(sequence, positions in it, rows of dQ, dK and dV) of every sequence that each call holds part of."""
        for call, shards in zip(self.calls, self.forwards.shards, strict=True):
            positions = torch.from_numpy(shards.positions.astype("int64")).to(call.dq.device)
            for held, sequence in enumerate(shards.sequences.tolist()):
                rows = slice(*shards.cu_seqlens[held : held + 2].tolist())
                yield sequence, positions[rows], (call.dq[rows], call.dk[rows], call.dv[rows])

    def _gradients(self) -> list[torch.Tensor]:
        return [getattr(call, name) for call in self.calls for name in NAMES]


def prepare_gradients(
    placement: Placement,
    tensors: Tensors,
    gradient: torch.Tensor,
    *,
    heads_per_task: int | None = None,
    causal: bool = True,
    strided: bool = False,
    make_domain: MakeDomain = LocalDomain,
) -> GradientCalls:
    """Calls of the ranks of ``placement`` that live here, as ``prepare`` makes them.

    gradient: of the output, ``[T, Hq, D]``. heads_per_task: as in ``GradientCalls``.
    """
    (query_heads, head_dim), kv_heads = tensors[0].shape[1:], tensors[1].shape[1]
    sum_all = heads_per_task is not None and heads_per_task < query_heads // kv_heads
    slots = most_slots(placement.shards(0), sum_all)

    def domain_with_slots(ranks: int, layout: ArenaLayout, device: torch.device) -> Domain:
        return make_domain(ranks, dataclasses.replace(layout, slots=slots), device)

    forwards = prepare(placement, tensors, causal=causal, strided=strided, make_domain=domain_with_slots)
    calls = []
    for call, shards, index in zip(forwards.calls, forwards.shards, forwards.tokens, strict=True):
        device = call.q.device
        plan = plan_backward(shards, causal=causal, sum_all=sum_all)
        (output_gradient,) = packed([gradient[index]], len(call.q), False)
        made = [torch.empty(each.shape, dtype=each.dtype, device=device) for each in (call.q, call.k, call.v)]
        workspace = Workspace.make(len(plan.query_tiles), query_heads, head_dim, device)
        workspace.statistics.fill_(float("nan"))
        on_device = backward_to_device(plan, call.plan, device)
        calls.append(BackwardCall(on_device, call, output_gradient, *made, workspace))
    prepared = GradientCalls(forwards, calls, heads_per_task)
    prepared.poison()
    return prepared


def gradient_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Relative L2 error of gradients ``[n, heads, D]``; NaN when ``found`` holds any.

    Where a query sees one key, dQ and dK are exactly 0 (dS = P (dP - delta) with P = 1 and delta = dP). So the error is
    relative to the norm of one row of elements of ``LEAST`` if the gradient's norm is smaller, which it only is for
    sequences of a token or two of normal inputs.
    """
    wanted = wanted.double()
    norm = max(float(wanted.square().sum()), least_square(*wanted.shape[1:]))
    return (float((found.double() - wanted).square().sum()) / norm) ** 0.5


def largest(values: Iterable[float]) -> float:
    """The largest of them; NaN if one is NaN."""
    return max(values, key=lambda value: (value != value, value))


def least_square(heads: int, head_dim: int) -> float:
    """The squared norm to which ``gradient_error`` is at least relative."""
    return LEAST**2 * heads * head_dim


def kernels() -> list[Specialisation]:
    """All forward and backward kernels."""
    choices = list(product((128, 64), (True, False), (True, False)))
    return [
        make(head_dim, bfloat16=narrow, causal=mask)
        for make in (backward, forward)
        for head_dim, narrow, mask in choices
    ]


def compile_kernels(folder: Path | None) -> None:
    """Compile what is not in the cache, side by side."""
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda each: build(each, folder=folder), kernels()))
