"""Many random mixes of long and short sequences against fp64, each sequence judged by itself beside a library's error.

The lengths come from a fixed list and the values of a sequence from its length, so that fp64 results and the library's
errors are computed once per length. The suite can run in parts.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from buddyring.placement import Placement
from megaring.kernels.arena import LocalDomain, PeerTimeout
from megaring.kernels.checks.bank import Bank, Judgement, Kind, inputs, judge, squares
from megaring.kernels.checks.calls import Calls, MakeDomain, prepare
from megaring.kernels.checks.forward import LSE_LIMIT, OUTPUT_FLOOR, Case

MIXES = 240
MOST_TOKENS = 120_000
LENGTHS = (
    *(1, 2, 3, 5, 7, 16, 31, 63, 64, 65, 96, 100, 127, 128, 129, 130, 191, 192, 255, 256),
    *(257, 300, 383, 384, 500, 511, 512, 640, 777, 1000, 1023, 1024, 1025, 1280, 1537, 2047, 2048, 2500),
    *(3001, 4096, 5000, 6143, 8192, 9999, 12345, 16384, 20000, 24577, 32768, 40000),
)
KINDS = (Kind(), Kind(), Kind(), Kind(head_dim=64, dtype=torch.float16), Kind(causal=False))  # the first most often


@dataclass(frozen=True)
class Outcome:
    """One mix. worst: by its length, the sequence whose output is furthest from its limit."""

    worst_length: int
    worst: Judgement
    worst_lse: float
    repeatable: bool
    detail: str
    failed: tuple[int, ...]  # lengths over their limit

    @property
    def passed(self) -> bool:
        """Every sequence within its limit, and bit-equal from call to call."""
        return not self.failed and self.repeatable and not self.detail


def mix(seed: int, ranks: tuple[int, ...] = (1, 2, 4, 8)) -> Case:
    """Mix number ``seed``; the first of its lengths goes through the list, so that ``len(LENGTHS)`` mixes have all.

    Lengths differ within a mix, since equal ones would hold equal values.
    """
    rng = random.Random(seed)
    domain = rng.choice(ranks)
    lengths = [LENGTHS[seed % len(LENGTHS)]]
    for length in rng.sample(LENGTHS, rng.randint(0, 11)):
        if length not in lengths and sum(lengths) + length <= MOST_TOKENS:
            lengths.append(length)
    rng.shuffle(lengths)
    groups = []
    for length in lengths:
        size = rng.choice([size for size in (1, 2, 4, 8) if size <= domain and (size == 1 or 2 * size <= length)])
        groups.append((rng.randrange(domain // size) * size, size))
    kv_heads = rng.choice((1, 2, 3, 4, 8))
    kind = rng.choice(KINDS)
    return Case(
        tuple(lengths),
        domain,
        tuple(groups),
        query_heads=kv_heads * rng.choice([ratio for ratio in (1, 2, 3, 4, 5, 8, 16) if kv_heads * ratio <= 40]),
        kv_heads=kv_heads,
        head_dim=kind.head_dim,
        dtype=kind.dtype,
        causal=kind.causal,
        strided=rng.random() < 0.3,
        rank_multiple=rng.choice((1, 1, 8, 64)),
        seed=seed,
    )


def prepare_mix(case: Case, bank: Bank, make_domain: MakeDomain = LocalDomain) -> Calls:
    """The calls of ``case`` on the bank's sequences."""
    kind = Kind(case.head_dim, case.dtype, case.causal)
    parts = [inputs(bank.entry(length, kind), case.query_heads, case.kv_heads) for length in case.lengths]
    placement = Placement.from_groups(case.lengths, case.ranks, case.groups, rank_multiple=case.rank_multiple)
    tensors = tuple(torch.cat(columns) for columns in zip(*parts, strict=True))
    return prepare(placement, tensors, causal=case.causal, strided=case.strided, make_domain=make_domain)


def run_mix(
    case: Case,
    bank: Bank,
    *,
    repeats: int = 2,
    group: dist.ProcessGroup | None = None,
    make_domain: MakeDomain = LocalDomain,
    **options,
) -> Outcome:
    """Run one mix and judge it. group: the processes that share it, whose ranks all give the same outcome."""
    calls = prepare_mix(case, bank, make_domain)
    faults = torch.zeros(
        3, dtype=torch.float64, device=calls.calls[0].out.device
    )  # calls that stop, differ, leave rows
    if group is not None:
        dist.all_reduce(faults, group=group)  # nobody sends into an arena that is still being poisoned
    stopped: PeerTimeout | None = None
    try:
        calls.run(**options)
        first = calls.outputs()
        for _ in range(repeats - 1):
            calls.poison()
            calls.run(**options)
            faults[1] += calls.differing(first)
        faults[2] = calls.dirty()
    except PeerTimeout as error:
        stopped, faults[0] = error, 1
    if group is not None:
        dist.all_reduce(faults, group=group)
    if faults[0]:
        raise stopped or PeerTimeout("another process had to stop")
    kind = Kind(case.head_dim, case.dtype, case.causal)
    sums = torch.zeros(len(case.lengths), 5, dtype=torch.float64, device=faults.device)
    for sequence, positions, out, lse in calls.pieces():
        sums[sequence] += squares(bank.entry(case.lengths[sequence], kind), out, lse, case.kv_heads, positions)
    if group is not None:
        dist.all_reduce(sums, group=group)
    judged = {
        length: judge(bank.entry(length, kind), sums[i], case.query_heads, case.kv_heads)
        for i, length in enumerate(case.lengths)
    }
    return outcome(judged, repeatable=not faults[1], dirty=bool(faults[2]))


def outcome(judged: dict[int, Judgement], *, repeatable: bool, dirty: bool) -> Outcome:
    """The verdict on a mix from those on its sequences, by length."""

    def excess(length: int) -> float:
        share = judged[length].output / max(OUTPUT_FLOOR, 1.5 * judged[length].library)
        return share if share == share else float("inf")  # NaN is the worst

    worst = max(judged, key=excess)
    failed = [length for length in judged if not (excess(length) <= 1 and judged[length].lse <= LSE_LIMIT)]
    return Outcome(
        worst_length=worst,
        worst=judged[worst],
        worst_lse=max((each.lse for each in judged.values()), key=lambda lse: (lse != lse, lse)),
        repeatable=repeatable,
        detail="rows of no sequence are not cleared" if dirty else "",
        failed=tuple(failed),
    )


def check_mixes(folder: Path | None, *, part: tuple[int, int] = (1, 1), timeout_s: float = 5.0) -> Iterator[dict]:
    """Part ``i`` of ``n`` of all mixes, on virtual ranks of this GPU: one row each."""
    device = torch.device("cuda", torch.cuda.current_device())
    bank, rows, start = Bank(device), [], time.monotonic()
    for seed in range(part[0] - 1, MIXES, part[1]):
        rows.append(row_of(mix(seed), bank, timeout_s=timeout_s, folder=folder))
        yield rows[-1]
    print(f"part {part[0]} of {part[1]}: {summary(rows)} in {time.monotonic() - start:.0f} s")


def row_of(case: Case, bank: Bank, **options) -> dict:
    """Run one mix; its JSON-ready row, printed when it fails."""
    row: dict = {"name": f"{case.label} seed {case.seed}", "seed": case.seed, "passed": False}
    try:
        result = run_mix(case, bank, **options)
    except PeerTimeout as error:
        print(f"FAIL {row['name']}: {error}")
        return {**row, "detail": str(error)}
    row |= {
        "passed": result.passed,
        "lengths": case.lengths,
        "worst_length": result.worst_length,
        "output": result.worst.output,
        "library": result.worst.library,
        "lse": result.worst_lse,
        "repeatable": result.repeatable,
        "failed_lengths": result.failed,
        "detail": result.detail,
    }
    if not result.passed:
        print(f"FAIL {row['name']}: {row}")
    return row


def summary(rows: list[dict]) -> str:
    """One line on the rows of a suite."""
    judged = [row for row in rows if "output" in row]
    text = f"{sum(row['passed'] for row in rows)} of {len(rows)} mixes passed"
    if not judged:
        return text
    worst = max(judged, key=lambda row: row["output"] / max(row["library"], OUTPUT_FLOOR / 1.5))
    return (
        f"{text}; worst output error {max(row['output'] for row in judged):.2e}, worst ratio to the library "
        f"{worst['output'] / max(worst['library'], 1e-9):.2f} ({worst['worst_length']} tokens), "
        f"worst LSE error {max(row['lse'] for row in judged):.1e}"
    )
