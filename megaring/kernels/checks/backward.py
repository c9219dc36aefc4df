"""Whole backward calls, of one rank or several virtual ones, against fp64 on the same inputs, in poisoned buffers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from buddyring.placement import Placement
from megaring.kernels.arena import ArenaLayout, LocalDomain
from megaring.kernels.backward_plan import plan_backward
from megaring.kernels.checks.calls import packed
from megaring.kernels.checks.forward import Case
from megaring.kernels.checks.units import relative_error
from megaring.kernels.megaring_backward import BackwardCall, backward_to_device, megaring_backward
from megaring.kernels.megaring_forward import RankCall, megaring_forward
from megaring.kernels.workspace import Workspace

FLOOR = 1e-3
NAMES = ("dq", "dk", "dv")


@dataclass(frozen=True)
class BackwardOutcome:
    """Relative L2 errors of dQ, dK and dV of one case: ours and a library's, both against fp64.

    spread: largest difference between repeats, relative to the gradients' norm.
    """

    errors: tuple[float, ...]
    library: tuple[float, ...]
    spread: float
    detail: str

    @property
    def passed(self) -> bool:
        """Within 1.5 times the library's error or the floor."""
        pairs = zip(self.errors, self.library, strict=True)
        return not self.detail and all(ours <= max(FLOOR, 1.5 * theirs) for ours, theirs in pairs)


def run_backward_case(
    case: Case,
    *,
    repeats: int = 3,
    heads_per_task: int | None = None,
    timeout_s: float = 1.0,
    folder: Path | None = None,
) -> BackwardOutcome:
    """Run one case, forward and backward, on the current device and judge its gradients."""
    placement = Placement.from_groups(case.lengths, case.ranks, case.groups, rank_multiple=case.rank_multiple)
    device = torch.device("cuda", torch.cuda.current_device())
    generator = torch.Generator(device).manual_seed(case.seed)
    total = sum(case.lengths)

    def values(heads: int) -> torch.Tensor:
        return torch.randn(total, heads, case.head_dim, device=device, generator=generator).to(case.dtype)

    heads = (case.query_heads, case.kv_heads, case.kv_heads)
    q, k, v = (values(each) for each in heads)
    gradient = values(case.query_heads)
    scale = case.head_dim**-0.5
    sum_all = heads_per_task is not None and heads_per_task < case.query_heads // case.kv_heads
    plans = [plan_backward(placement.shards(r), causal=case.causal, sum_all=sum_all) for r in range(case.ranks)]
    tiles, slots = max(plan.forward.arena_tiles for plan in plans), max(plan.slots for plan in plans)
    layout = ArenaLayout(tiles, case.kv_heads, case.head_dim, slots)
    domain = LocalDomain(case.ranks, layout, device)
    for arena in domain.arenas:
        arena[layout.data_offset : layout.counts_offset] = 0xFF  # NaN in both types
    indices = [torch.from_numpy(placement.shards(rank).tokens.copy()).to(device) for rank in range(case.ranks)]
    calls = []
    for plan, index in zip(plans, indices, strict=True):
        rows = plan.forward.rows
        parts = packed([tensor[index] for tensor in (q, k, v)], rows, case.strided)
        (output_gradient,) = packed([gradient[index]], rows, False)
        out = torch.full(output_gradient.shape, float("nan"), dtype=case.dtype, device=device)
        lse = torch.full(out.shape[:2], float("nan"), device=device)
        on_device = backward_to_device(plan, None, device)
        workspace = Workspace.make(len(plan.query_tiles), case.query_heads, case.head_dim, device)
        workspace.statistics.fill_(float("nan"))
        forward = RankCall(on_device.forward, *parts, out, lse)
        gradients = [
            torch.full((rows, each, case.head_dim), float("nan"), dtype=case.dtype, device=device) for each in heads
        ]
        calls.append(BackwardCall(on_device, forward, output_gradient, *gradients, workspace))
    megaring_forward(domain, [call.forward for call in calls], softmax_scale=scale, timeout_s=timeout_s, folder=folder)

    detail, spread = "", 0.0
    first: list[torch.Tensor] = []
    found = [torch.full_like(tensor, float("nan")) for tensor in (q, k, v)]
    for _ in range(repeats):
        for call in calls:
            for name in NAMES:
                getattr(call, name).fill_(float("nan"))
        megaring_backward(
            domain,
            calls,
            softmax_scale=scale,
            heads_per_task=heads_per_task,
            timeout_s=timeout_s,
            folder=folder,
        )
        torch.cuda.synchronize()
        domain.check()
        for call, index in zip(calls, indices, strict=True):
            for whole, name in zip(found, NAMES, strict=True):
                part = getattr(call, name)
                whole[index] = part[: len(index)]
                if (part[len(index) :] != 0).any():
                    detail = f"{name}: rows of no sequence are not cleared"
            if call.workspace.query_sums.count_nonzero() or call.workspace.counters.count_nonzero():
                detail = "the sums of dQ, or their counters, are not zero again"
        first = first or [tensor.clone() for tensor in found]
        spread = max(spread, *(relative_error(tensor, was) for tensor, was in zip(found, first, strict=True)))
    for arena in domain.arenas:
        if slots and arena[layout.counts_offset :].count_nonzero():
            detail = "the sums of dK and dV, or their counts, are not zero again"

    wanted, library = _judge(case, (q, k, v), gradient, scale)
    for name, ours, right in zip(NAMES, found, wanted, strict=True):
        if not ours.isfinite().all():
            bad = (~ours.isfinite()).any(dim=2).any(dim=1).nonzero().flatten()
            detail = f"{name}: {len(bad)} of {total} rows are not finite, from {int(bad[0])} on"
        elif relative_error(ours, right) > 0.05:
            off = ((ours - right).norm(dim=2) / right.norm(dim=2)) > 0.05
            rows, where = off.any(dim=1).nonzero().flatten(), off.any(dim=0).nonzero().flatten()
            detail += f"{name}: {len(rows)} of {total} rows off, from {int(rows[0])} on, heads {where.tolist()[:8]}; "
    return BackwardOutcome(
        tuple(relative_error(ours, right) for ours, right in zip(found, wanted, strict=True)),
        tuple(relative_error(theirs, right) for theirs, right in zip(library, wanted, strict=True)),
        spread,
        detail,
    )


def _judge(
    case: Case, inputs: tuple[torch.Tensor, ...], gradient: torch.Tensor, scale: float
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Gradients in fp64 and a library's, of every sequence by itself; cuDNN for long ones, as in the forward."""
    wanted = [torch.empty(tensor.shape, dtype=torch.float64, device=tensor.device) for tensor in inputs]
    library = [torch.empty_like(tensor) for tensor in inputs]
    ratio = case.query_heads // case.kv_heads
    start = 0
    for length in case.lengths:
        rows = slice(start, start + length)
        start += length
        leaves = [tensor[rows].transpose(0, 1).detach() for tensor in inputs]
        wide = [leaf.double().requires_grad_() for leaf in leaves]
        keys, values = (leaf.repeat_interleave(ratio, 0) for leaf in wide[1:])
        scores = wide[0] @ keys.transpose(1, 2) * scale
        if case.causal:
            hidden = torch.ones(length, length, dtype=torch.bool, device=scores.device).triu(1)
            scores = scores.masked_fill(hidden, float("-inf"))
        out = scores.softmax(dim=2) @ values
        part = gradient[rows].transpose(0, 1)
        for whole, found in zip(wanted, torch.autograd.grad(out, wide, part.double()), strict=True):
            whole[rows] = found.transpose(0, 1)
        narrow = [leaf.repeat_interleave(ratio if i else 1, 0).requires_grad_() for i, leaf in enumerate(leaves)]
        backends = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]
        backends = [*(backends if length >= 256 else reversed(backends)), SDPBackend.MATH]
        with sdpa_kernel(backends, set_priority=True):
            out = scaled_dot_product_attention(*(leaf[None] for leaf in narrow), is_causal=case.causal, scale=scale)
            made = torch.autograd.grad(out, narrow, part[None])
        for i, (whole, found) in enumerate(zip(library, made, strict=True)):
            grouped = found.float().view(whole.shape[1], -1, *found.shape[1:]).sum(1) if i else found
            whole[rows] = grouped.transpose(0, 1).to(whole.dtype)
    return wanted, library
