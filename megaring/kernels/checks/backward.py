"""Whole backward calls, of one rank or several virtual ones, against fp64 on the same inputs, in poisoned buffers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from buddyring.placement import Placement
from megaring.kernels.arena import PeerTimeout
from megaring.kernels.checks.forward import Case, simple_cases
from megaring.kernels.checks.gradient_calls import (
    NAMES,
    GradientCalls,
    Tensors,
    compile_kernels,
    gradient_error,
    largest,
    prepare_gradients,
)

FLOOR = 1e-3
WATCHED = Case((4000, 300), 2, ((0, 2), (0, 1)), 4, 2)  # whose second rank never comes


def limit(library: float) -> float:
    """The largest relative L2 error of a gradient beside a library's."""
    return max(FLOOR, 1.5 * library)


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
        """Within 1.5 times the library's error or the floor, and repeats differ by rounding alone."""
        good = all(ours <= limit(theirs) for ours, theirs in zip(self.errors, self.library, strict=True))
        return good and self.spread <= FLOOR and not self.detail


def check_gradients(folder: Path | None, *, timeout_s: float = 1.0) -> Iterator[dict]:
    """The forward's simple cases, forward and backward, and a peer that never comes: a row each."""
    compile_kernels(folder)
    for case in simple_cases():
        # One query head per task sums in fp32 what a task for all of them keeps in registers.
        for heads_per_task in (None, 1) if case.query_heads > case.kv_heads else (None,):
            name = case.label if heads_per_task is None else f"{case.label}, 1 head per task"
            try:
                result = run_backward_case(case, heads_per_task=heads_per_task, timeout_s=timeout_s, folder=folder)
            except PeerTimeout as error:
                print(f"FAIL {name}: {error}")
                yield {"name": name, "passed": False, "detail": str(error)}
                continue
            pairs = zip(NAMES, result.errors, result.library, strict=True)
            print(
                f"{'PASS' if result.passed else 'FAIL'} {name}: "
                + ", ".join(f"{each} {ours:.2e} (library {theirs:.2e})" for each, ours, theirs in pairs)
                + f", spread {result.spread:.1e} {result.detail}"
            )
            yield {
                "name": name,
                "passed": result.passed,
                "errors": result.errors,
                "library": result.library,
                "spread": result.spread,
                "detail": result.detail,
            }
    yield _watchdog(folder, max(5.0, timeout_s))


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
    tensors, gradient = _random(case)
    calls = prepare_gradients(
        placement, tensors, gradient, heads_per_task=heads_per_task, causal=case.causal, strided=case.strided
    )
    calls.forwards.run(timeout_s=timeout_s, folder=folder)
    detail, spread = "", 0.0
    first: list[torch.Tensor] = []
    for _ in range(repeats):
        calls.poison()
        calls.run(timeout_s=timeout_s, folder=folder)
        detail = detail or calls.fault()
        first = first or calls.copies()
        spread = largest((spread, calls.spread(first)))
    found = [torch.full_like(tensor, float("nan")) for tensor in tensors]
    for call, index in zip(calls.calls, calls.forwards.tokens, strict=True):
        for whole, name in zip(found, NAMES, strict=True):
            whole[index] = getattr(call, name)[: len(index)]

    wanted, library = _judge(case, tensors, gradient, calls.forwards.scale)
    for name, ours, right in zip(NAMES, found, wanted, strict=True):
        if not ours.isfinite().all():
            bad = (~ours.isfinite()).any(dim=2).any(dim=1).nonzero().flatten()
            detail = f"{name}: {len(bad)} of {len(ours)} rows are not finite, from {int(bad[0])} on"
        elif gradient_error(ours, right) > 0.05:
            off = ((ours - right).norm(dim=2) / right.norm(dim=2)) > 0.05
            rows, where = off.any(dim=1).nonzero().flatten(), off.any(dim=0).nonzero().flatten()
            detail += f"{name}: {len(rows)} of {len(ours)} rows off, heads {where.tolist()[:8]}; "
    return BackwardOutcome(
        tuple(gradient_error(ours, right) for ours, right in zip(found, wanted, strict=True)),
        tuple(gradient_error(theirs, right) for theirs, right in zip(library, wanted, strict=True)),
        spread,
        detail,
    )


def _random(case: Case) -> tuple[Tensors, torch.Tensor]:
    """q, k and v of all sequences, and the output's gradient."""
    device = torch.device("cuda", torch.cuda.current_device())
    generator = torch.Generator(device).manual_seed(case.seed)
    q, k, v, gradient = (
        torch.randn(sum(case.lengths), heads, case.head_dim, device=device, generator=generator).to(case.dtype)
        for heads in (case.query_heads, case.kv_heads, case.kv_heads, case.query_heads)
    )
    return (q, k, v), gradient


def _watchdog(folder: Path | None, forward_timeout_s: float) -> dict:
    """A rank whose peer never comes to the backward: its record within the bound, and NaN instead of gradients."""
    placement = Placement.from_groups(WATCHED.lengths, WATCHED.ranks, WATCHED.groups)
    calls = prepare_gradients(placement, *_random(WATCHED))
    calls.forwards.run(timeout_s=forward_timeout_s, folder=folder)
    for call in calls.calls:
        for name in NAMES:
            getattr(call, name).zero_()
    alone = GradientCalls(calls.forwards, calls.calls[:1], None)
    start = time.monotonic()
    try:
        alone.run(timeout_s=0.5, folder=folder)
        message = "no error was raised"
    except PeerTimeout as error:
        message = str(error)
    seconds = time.monotonic() - start
    poisoned = all(bool(getattr(alone.calls[0], name).isnan().all()) for name in NAMES)
    passed = poisoned and "rank 0 waited for" in message and "from rank 1" in message and seconds < 5
    name = "peer that never comes to the backward"
    print(f"{'PASS' if passed else 'FAIL'} {name}: {seconds:.2f} s, all NaN: {poisoned}, {message}")
    return {"name": name, "passed": passed, "seconds": seconds, "message": message}


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
