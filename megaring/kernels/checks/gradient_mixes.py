"""Many random mixes of long and short sequences, forward and backward, against fp64 gradients.

The mixes are those of ``mixes``, with the number of query heads of a task drawn besides and fewer heads beside long
sequences; each sequence's dQ, dK and dV are judged by themselves, beside a library's. All lengths then run once more
whole on one rank and split over eight, whose errors are compared. The suite can run in parts.
"""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from buddyring.placement import Placement
from megaring.kernels.arena import PeerTimeout
from megaring.kernels.checks.backward import FLOOR, limit
from megaring.kernels.checks.bank import KV_HEADS, QUERY_HEADS, Kind
from megaring.kernels.checks.forward import Case
from megaring.kernels.checks.gradient_bank import (
    Errors,
    GradientBank,
    gradient_errors,
    gradient_inputs,
    gradient_squares,
)
from megaring.kernels.checks.gradient_calls import (
    NAMES,
    GradientCalls,
    compile_kernels,
    largest,
    prepare_gradients,
)
from megaring.kernels.checks.mixes import KINDS, LENGTHS, MIXES, MOST_TOKENS, mix

LONG = 8192  # mixes with longer sequences have
LONG_QUERY_HEADS = 16  # about this many query heads at most
MOST_RATIO = 1.2  # of the error on eight ranks to that on one


@dataclass(frozen=True)
class GradientMix:
    """One mix. heads_per_task: query heads of a backward task, a divisor of the GQA ratio."""

    case: Case
    heads_per_task: int


@dataclass(frozen=True)
class Worst:
    """The gradient that is furthest from its limit: of which sequence and name, our error and the library's."""

    length: int
    name: str
    error: float
    library: float

    @property
    def excess(self) -> float:
        """The error as a share of its limit; NaN is the worst."""
        share = self.error / limit(self.library)
        return share if share == share else float("inf")


@dataclass(frozen=True)
class GradientOutcome:
    """One mix. failed: lengths over their limit. spread: see ``GradientCalls``."""

    worst: Worst
    spread: float
    detail: str
    failed: tuple[int, ...]

    @property
    def passed(self) -> bool:
        """Every gradient of every sequence within its limit, repeats apart by rounding alone, all memory in order."""
        return not self.failed and self.spread <= FLOOR and not self.detail


def gradient_mix(seed: int) -> GradientMix:
    """Mix number ``seed``: the placement, type and mask of ``mix(seed)``."""
    case = mix(seed)
    ratio = case.query_heads // case.kv_heads
    if max(case.lengths) > LONG:
        kv_heads = min(case.kv_heads, max(1, LONG_QUERY_HEADS // ratio))
        case = dataclasses.replace(case, kv_heads=kv_heads, query_heads=kv_heads * ratio)
    divisors = [heads for heads in range(1, ratio + 1) if ratio % heads == 0]
    return GradientMix(case, random.Random(f"heads per task {seed}").choice(divisors))


def run_gradient_mix(mixed: GradientMix, bank: GradientBank, *, repeats: int = 2, **options) -> GradientOutcome:
    """Run one mix and judge its last call. ``options``: of both kernels. Raises PeerTimeout."""
    case = mixed.case
    calls = _calls(case, bank, mixed.heads_per_task)
    calls.forwards.run(**options)
    calls.run(**options)
    spread, detail = 0.0, calls.fault()
    for _ in range(repeats - 1):
        first = calls.copies()
        calls.poison()
        calls.run(**options)
        spread, detail = largest((spread, calls.spread(first))), detail or calls.fault()
    return gradient_outcome(_errors(calls, case, bank), spread=spread, detail=detail)


def gradient_outcome(found: dict[int, tuple[Errors, Errors]], *, spread: float, detail: str) -> GradientOutcome:
    """The verdict on a mix from the errors of dQ, dK and dV, ours and a library's, by length."""
    judged = [Worst(length, *each) for length, pair in found.items() for each in zip(NAMES, *pair, strict=True)]
    failed = tuple(dict.fromkeys(each.length for each in judged if not each.excess <= 1))
    return GradientOutcome(max(judged, key=lambda each: each.excess), spread, detail, failed)


def check_gradient_mixes(
    folder: Path | None, *, part: tuple[int, int] = (1, 1), timeout_s: float = 5.0
) -> Iterator[dict]:
    """Part ``i`` of ``n`` of all mixes, on virtual ranks of this GPU, then of the lengths on one rank and eight."""
    compile_kernels(folder)
    device = torch.device("cuda", torch.cuda.current_device())
    bank, rows, start = GradientBank(device), [], time.monotonic()
    for seed in range(part[0] - 1, MIXES, part[1]):
        rows.append(gradient_row(gradient_mix(seed), bank, timeout_s=timeout_s, folder=folder))
        yield rows[-1]
    print(f"part {part[0]} of {part[1]}: {gradient_summary(rows)} in {time.monotonic() - start:.0f} s")
    for kind in dict.fromkeys(KINDS):
        yield rank_row(LENGTHS[part[0] - 1 :: part[1]], kind, bank, timeout_s=timeout_s, folder=folder)
    print(f"the library: {bank.libraries()}; {time.monotonic() - start:.0f} s in all")


def gradient_row(mixed: GradientMix, bank: GradientBank, **options) -> dict:
    """Run one mix; its JSON-ready row, printed when it fails."""
    case = mixed.case
    name = f"{case.label} {mixed.heads_per_task} heads per task, seed {case.seed}"
    row: dict = {"name": name, "seed": case.seed, "passed": False}
    try:
        result = run_gradient_mix(mixed, bank, **options)
    except PeerTimeout as error:
        print(f"FAIL {name}: {error}")
        return {**row, "detail": str(error)}
    row |= {
        "passed": result.passed,
        "lengths": case.lengths,
        "heads_per_task": mixed.heads_per_task,
        "worst_length": result.worst.length,
        "worst_gradient": result.worst.name,
        "error": result.worst.error,
        "library": result.worst.library,
        "spread": result.spread,
        "failed_lengths": result.failed,
        "detail": result.detail,
    }
    if not result.passed:
        print(f"FAIL {name}: {row}")
    return row


def gradient_summary(rows: Sequence[dict]) -> str:
    """One line on the rows of the mixes: for each gradient, the largest ratio to the library among the worst."""
    text = f"{sum(row['passed'] for row in rows)} of {len(rows)} mixes passed"
    judged = [row for row in rows if "error" in row]
    for name in NAMES:
        of_name = [row for row in judged if row["worst_gradient"] == name]
        if of_name:
            worst = max(of_name, key=lambda row: row["error"] / max(row["library"], FLOOR / 1.5))
            text += f"; worst {name} {worst['error']:.2e}, {worst['error'] / max(worst['library'], 1e-9):.2f} of the "
            text += f"library's ({worst['worst_length']} tokens)"
    if judged:
        text += f"; largest spread {max(row['spread'] for row in judged):.1e}"
    return text


def rank_row(lengths: Sequence[int], kind: Kind, bank: GradientBank, **options) -> dict:
    """The worst ratio of an error on eight ranks to that on one, over ``lengths`` of at least 16 tokens."""
    ratios, detail = {}, ""
    for batch in batches([length for length in lengths if length >= 16]):
        found = {}
        for ranks in (1, 8):
            heads = {"query_heads": KV_HEADS * QUERY_HEADS, "kv_heads": KV_HEADS}
            groups = ((0, ranks),) * len(batch)
            case = Case(batch, ranks, groups, **heads, head_dim=kind.head_dim, dtype=kind.dtype, causal=kind.causal)
            calls = _calls(case, bank, None)
            try:
                calls.forwards.run(**options)
                calls.run(**options)
            except PeerTimeout as error:
                return _rank_row(kind, {}, str(error))
            found[ranks], detail = _errors(calls, case, bank), detail or calls.fault()
            del calls
        for length in batch:
            for name, one, eight in zip(NAMES, found[1][length][0], found[8][length][0], strict=True):
                ratios[f"{name} of {length} tokens"] = eight / max(one, 1e-12)
    return _rank_row(kind, ratios, detail)


def batches(lengths: Sequence[int]) -> list[tuple[int, ...]]:
    """The lengths in order, in groups of at most ``MOST_TOKENS`` tokens."""
    made: list[tuple[int, ...]] = []
    for length in lengths:
        if made and sum(made[-1]) + length <= MOST_TOKENS:
            made[-1] += (length,)
        else:
            made.append((length,))
    return made


def _rank_row(kind: Kind, ratios: dict[str, float], detail: str) -> dict:
    worst = largest(ratios.values()) if ratios else None
    where = ", ".join(name for name, ratio in ratios.items() if ratio is worst)
    passed = not detail and (worst is None or worst <= MOST_RATIO)
    mask = "causal" if kind.causal else "full"
    name = f"8 ranks over 1: D={kind.head_dim} {str(kind.dtype).removeprefix('torch.')} {mask}"
    shown = "no length" if worst is None else f"worst ratio of errors {worst:.3f}, {where}"
    print(f"{'PASS' if passed else 'FAIL'} {name}: {shown} {detail}")
    return {"name": name, "passed": passed, "ratio": worst, "where": where, "detail": detail}


def _calls(case: Case, bank: GradientBank, heads_per_task: int | None) -> GradientCalls:
    kind = Kind(case.head_dim, case.dtype, case.causal)
    entries = [bank.entry(length, kind) for length in case.lengths]
    tensors, gradient = gradient_inputs(entries, case.query_heads, case.kv_heads)
    placement = Placement.from_groups(case.lengths, case.ranks, case.groups, rank_multiple=case.rank_multiple)
    return prepare_gradients(
        placement, tensors, gradient, heads_per_task=heads_per_task, causal=case.causal, strided=case.strided
    )


def _errors(calls: GradientCalls, case: Case, bank: GradientBank) -> dict[int, tuple[Errors, Errors]]:
    """Errors of dQ, dK and dV, ours and the library's, by length."""
    kind = Kind(case.head_dim, case.dtype, case.causal)
    sums = torch.zeros(len(case.lengths), 3, 3, dtype=torch.float64, device=calls.calls[0].dq.device)
    for sequence, positions, gradients in calls.pieces():
        sums[sequence] += gradient_squares(bank.entry(case.lengths[sequence], kind), gradients, positions)
    heads = (case.query_heads, case.kv_heads, case.kv_heads)
    return {length: gradient_errors(sums[i], heads, case.head_dim) for i, length in enumerate(case.lengths)}
