"""Whole forward calls, of one rank or several virtual ones, against fp64 on the same inputs, in poisoned buffers."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from buddyring.placement import Placement
from megaring.kernels.checks.calls import prepare
from megaring.kernels.checks.units import relative_error

OUTPUT_FLOOR = 1e-3
LSE_LIMIT = 2e-6
LENGTHS = (
    1,
    2,
    3,
    5,
    16,
    31,
    63,
    64,
    65,
    100,
    127,
    128,
    129,
    191,
    255,
    256,
    257,
    383,
    500,
    640,
    1000,
    1023,
    1537,
    2048,
)


@dataclass(frozen=True)
class Case:
    """One call: a placement, head counts and the kernel's choices. strided: q, k, v are views into one tensor."""

    lengths: tuple[int, ...]
    ranks: int
    groups: tuple[tuple[int, int], ...]
    query_heads: int
    kv_heads: int
    head_dim: int = 128
    dtype: torch.dtype = torch.bfloat16
    causal: bool = True
    strided: bool = False
    rank_multiple: int = 1
    seed: int = 0

    @property
    def label(self) -> str:
        """Short description."""
        kind = "bf16" if self.dtype == torch.bfloat16 else "fp16"
        sizes = ",".join(f"{length}/{size}" for length, (_, size) in zip(self.lengths, self.groups, strict=True))
        mask = "causal" if self.causal else "full"
        return f"W={self.ranks} H={self.query_heads}:{self.kv_heads} D={self.head_dim} {kind} {mask} {sizes[:60]}"


@dataclass(frozen=True)
class Outcome:
    """Relative L2 errors of one case: ours and cuDNN's, both against fp64; and whether repeats were bit-equal."""

    output: float
    lse: float
    library: float
    repeatable: bool
    detail: str

    @property
    def passed(self) -> bool:
        """Within 1.5 times the library's error or the floor, and bit-equal from call to call."""
        good = self.output <= max(OUTPUT_FLOOR, 1.5 * self.library) and self.lse <= LSE_LIMIT
        return good and self.repeatable and not self.detail


def simple_cases() -> list[Case]:
    """One difficulty more at a time, so that the first that fails tells where to look."""

    def one(*lengths: int, **options) -> Case:
        return Case(lengths, 1, ((0, 1),) * len(lengths), **{"query_heads": 1, "kv_heads": 1, **options})

    return [
        one(128, causal=False),
        one(128),
        one(256, causal=False),
        one(256),
        one(640),
        one(100),
        one(1),
        one(300, 129, 64, 1, 513),
        one(384, head_dim=64),
        one(384, dtype=torch.float16),
        one(384, query_heads=8, kv_heads=2),
        one(384, 77, query_heads=6, kv_heads=3, strided=True, rank_multiple=64),
        one(*[200] * 90, query_heads=8, kv_heads=4),
        Case((512,), 2, ((0, 2),), 1, 1),
        Case((512,), 2, ((0, 2),), 1, 1, causal=False),
        Case((4, 300, 1000), 2, ((0, 2), (1, 1), (0, 2)), 4, 2, strided=True, rank_multiple=8),
        Case((2048, 3000, 500), 4, ((0, 4), (0, 4), (2, 2)), 4, 4),
        Case((4096, 3000, 16, 700), 8, ((0, 8), (0, 8), (0, 8), (4, 4)), 8, 1),
    ]


def random_case(seed: int) -> Case:
    """A mix of lengths, group sizes, heads, types and masks; some ranks may stay empty."""
    rng = random.Random(seed)
    ranks = rng.choice((1, 2, 4, 8))
    lengths = tuple(rng.choice(LENGTHS) for _ in range(rng.randint(1, 12)))
    groups = []
    for length in lengths:
        sizes = [size for size in (1, 2, 4, 8) if size <= ranks and (size == 1 or 2 * size <= length)]
        size = rng.choice(sizes)
        groups.append((rng.randrange(ranks // size) * size, size))
    kv_heads = rng.choice((1, 1, 2, 3, 4, 8))
    return Case(
        lengths,
        ranks,
        tuple(groups),
        query_heads=kv_heads * rng.choice((1, 2, 3, 4, 5)),
        kv_heads=kv_heads,
        head_dim=rng.choice((64, 128)),
        dtype=rng.choice((torch.bfloat16, torch.float16)),
        causal=rng.random() < 0.7,
        strided=rng.random() < 0.3,
        rank_multiple=rng.choice((1, 1, 8, 64)),
        seed=seed,
    )


def run_case(
    case: Case, *, repeats: int = 3, ping_pong: bool = False, timeout_s: float = 1.0, folder: Path | None = None
) -> Outcome:
    """Run one case on the current device and judge it."""
    placement = Placement.from_groups(case.lengths, case.ranks, case.groups, rank_multiple=case.rank_multiple)
    device = torch.device("cuda", torch.cuda.current_device())
    generator = torch.Generator(device).manual_seed(case.seed)
    total = sum(case.lengths)

    def values(heads: int) -> torch.Tensor:
        return torch.randn(total, heads, case.head_dim, device=device, generator=generator).to(case.dtype)

    q, k, v = values(case.query_heads), values(case.kv_heads), values(case.kv_heads)
    calls = prepare(placement, (q, k, v), causal=case.causal, strided=case.strided)
    calls.run(timeout_s=timeout_s, ping_pong=ping_pong, folder=folder)
    first = calls.outputs()
    repeatable = True
    for _ in range(repeats - 1):
        calls.poison()
        calls.run(timeout_s=timeout_s, ping_pong=ping_pong, folder=folder)
        repeatable &= calls.differing(first) == 0
    detail = "rows of no sequence are not cleared" if calls.dirty() else ""
    output, lse = torch.full_like(q, float("nan")), torch.full(q.shape[:2], float("nan"), device=device)
    for call, index in zip(calls.calls, calls.tokens, strict=True):
        output[index], lse[index] = call.out[: len(index)], call.lse[: len(index)]

    wanted, wanted_lse, library = _judge(case, q, k, v, calls.scale)
    if not output.isfinite().all():
        bad = (~output.isfinite()).any(dim=2).any(dim=1).nonzero().flatten()
        detail = f"{len(bad)} of {total} rows are not finite, from {int(bad[0])} on"
    elif relative_error(output, wanted) > 0.05:
        off = ((output - wanted).norm(dim=2) / wanted.norm(dim=2)) > 0.05
        rows, heads = off.any(dim=1).nonzero().flatten(), off.any(dim=0).nonzero().flatten()
        detail = f"{len(rows)} of {total} rows off, from {int(rows[0])} to {int(rows[-1])}, heads {heads.tolist()[:8]}"
    return Outcome(
        relative_error(output, wanted),
        relative_error(lse, wanted_lse),
        relative_error(library, wanted),
        repeatable,
        detail,
    )


def _judge(case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> tuple[torch.Tensor, ...]:
    """Output and LSE in fp64, and a library's output, of every sequence by itself.

    The library is cuDNN where it takes the shape. It plans each new one for a long time, so short sequences, whose
    errors weigh little in the sum, go to FlashAttention-2 first.
    """
    wanted = torch.empty(q.shape, dtype=torch.float64, device=q.device)
    wanted_lse = torch.empty(q.shape[:2], dtype=torch.float64, device=q.device)
    library = torch.empty_like(q)
    ratio = case.query_heads // case.kv_heads
    first = 0
    for length in case.lengths:
        rows = slice(first, first + length)
        parts = [q[rows].transpose(0, 1), *(each[rows].transpose(0, 1).repeat_interleave(ratio, 0) for each in (k, v))]
        wide = [part.double() for part in parts]
        scores = wide[0] @ wide[1].transpose(1, 2) * scale
        if case.causal:
            hidden = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
            scores.masked_fill_(hidden, float("-inf"))
        wanted_lse[rows] = scores.logsumexp(dim=2).T
        wanted[rows] = (scores.softmax(dim=2) @ wide[2]).transpose(0, 1)
        backends = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]
        backends = [*(backends if length >= 256 else reversed(backends)), SDPBackend.MATH]
        with sdpa_kernel(backends, set_priority=True):
            out = scaled_dot_product_attention(*(part[None] for part in parts), is_causal=case.causal, scale=scale)
        library[rows] = out[0].transpose(0, 1)
        first += length
    return wanted, wanted_lse, library
