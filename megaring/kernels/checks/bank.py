"""Sequences of fixed lengths with their fp64 attention and a library's error, so that many mixes can share them.

A sequence of ``KV_HEADS`` key heads and ``QUERY_HEADS`` query heads of each is drawn once per length, type and mask. A
case with more heads repeats them in turn; one with fewer takes the first. The numbers of repeated heads are no powers
of two, so that a kernel that confuses heads whose numbers differ by one gives other results.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

KV_HEADS = 3
QUERY_HEADS = 3  # of each key head
SCORE_BYTES = 2 << 30  # fp64 scores held at a time


@dataclass(frozen=True)
class Kind:
    """What entries of one length differ in."""

    head_dim: int = 128
    dtype: torch.dtype = torch.bfloat16
    causal: bool = True


@dataclass(frozen=True, eq=False)
class Entry:
    """One sequence of ``n`` tokens with 3 key and 9 query heads; query head ``3 a + b`` attends to key head ``a``.

    q: ``[n, 9, D]``; k, v: ``[n, 3, D]``. wanted: ``[n, 9, D]`` and wanted_lse: ``[n, 9]``, fp64.
    library_error: ``[9]`` fp64, squared L2 norm of a library's error per query head.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    wanted: torch.Tensor
    wanted_lse: torch.Tensor
    library_error: torch.Tensor


@dataclass(frozen=True)
class Judgement:
    """Relative L2 errors on one sequence: ours of output and LSE, and the library's of the output."""

    output: float
    lse: float
    library: float


class Bank:
    """Entries by length and kind, each made when it is first asked for and kept on ``device``."""

    def __init__(self, device: torch.device | str):
        self._device = torch.device(device)
        self._entries: dict[tuple[int, Kind], Entry] = {}

    def entry(self, length: int, kind: Kind) -> Entry:
        """The sequence of ``length`` tokens; its values depend on length and kind only."""
        key = (length, kind)
        if key not in self._entries:
            self._entries[key] = _make(length, kind, self._device)
        return self._entries[key]


def inputs(entry: Entry, query_heads: int, kv_heads: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``q [n, query_heads, D]`` and ``k, v [n, kv_heads, D]`` of a case with those head counts."""
    queries = torch.tensor(query_numbers(query_heads, kv_heads), device=entry.q.device)
    keys = torch.tensor([head % KV_HEADS for head in range(kv_heads)], device=entry.q.device)
    return entry.q[:, queries], entry.k[:, keys], entry.v[:, keys]


def query_numbers(query_heads: int, kv_heads: int) -> list[int]:
    """Which query head of an entry each query head of a case is."""
    ratio = query_heads // kv_heads
    return [head // ratio % KV_HEADS * QUERY_HEADS + head % ratio % QUERY_HEADS for head in range(query_heads)]


def squares(
    entry: Entry, out: torch.Tensor, lse: torch.Tensor, kv_heads: int, rows: torch.Tensor | slice = slice(None)
) -> torch.Tensor:
    """``[5]`` fp64: squared norms of our error, of the output, of our LSE's error, of the LSE, and number of LSEs.

    out ``[m, Hq, D]`` and lse ``[m, Hq]`` are those of the entry's tokens ``rows``; sums over disjoint rows add up.
    """
    sums = torch.zeros(5, dtype=torch.float64, device=out.device)
    for head, number in enumerate(query_numbers(out.shape[1], kv_heads)):  # one at a time, to bound the memory
        wanted, wanted_lse = entry.wanted[rows, number], entry.wanted_lse[rows, number]
        sums[0] += (out[:, head].double() - wanted).square().sum()
        sums[1] += wanted.square().sum()
        sums[2] += (lse[:, head].double() - wanted_lse).square().sum()
        sums[3] += wanted_lse.square().sum()
    sums[4] = lse.numel()
    return sums


def judge(entry: Entry, sums: torch.Tensor, query_heads: int, kv_heads: int) -> Judgement:
    """The errors on a whole sequence from the ``squares`` of all its rows.

    An LSE is a logarithm, and that of few keys can be near 0: its error is relative to 1 where its norm is smaller.
    """
    error, output, lse_error, lse, count = sums.tolist()
    library = float(entry.library_error[query_numbers(query_heads, kv_heads)].sum())
    return Judgement((error / output) ** 0.5, (lse_error / max(lse, count)) ** 0.5, (library / output) ** 0.5)


def draw(length: int, kind: Kind, device: torch.device) -> tuple[torch.Tensor, ...]:
    """q ``[n, 9, D]``, k and v ``[n, 3, D]``, and a gradient of the output ``[n, 9, D]``, of ``n = length`` tokens."""
    seed = length * 8 + (kind.head_dim == 64) * 4 + (kind.dtype == torch.float16) * 2 + kind.causal
    generator = torch.Generator(device).manual_seed(seed)
    return tuple(
        torch.randn(length, heads, kind.head_dim, device=device, generator=generator).to(kind.dtype)
        for heads in (KV_HEADS * QUERY_HEADS, KV_HEADS, KV_HEADS, KV_HEADS * QUERY_HEADS)
    )


def _make(length: int, kind: Kind, device: torch.device) -> Entry:
    q, k, v, _ = draw(length, kind, device)
    wanted, wanted_lse = attention_fp64(q, k, v, causal=kind.causal)
    error = (_library(q, k, v, kind.causal).double() - wanted).square().sum(dim=(0, 2))
    return Entry(q, k, v, wanted, wanted_lse, error)


def attention_fp64(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, score_bytes: int = SCORE_BYTES
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output ``[n, Hq, D]`` and LSE ``[n, Hq]`` in fp64 of one sequence, with a scale of ``D ** -0.5``.

    Rows are taken in blocks whose scores fill ``score_bytes``; under causality a block sees the keys up to its end.
    """
    length, query_heads, head_dim = q.shape
    ratio = query_heads // k.shape[1]
    wanted = torch.empty(q.shape, dtype=torch.float64, device=q.device)
    wanted_lse = torch.empty(q.shape[:2], dtype=torch.float64, device=q.device)
    block = max(1, min(length, score_bytes // (8 * ratio * length)))
    positions = torch.arange(length, device=q.device)
    for head in range(k.shape[1]):
        heads = slice(head * ratio, (head + 1) * ratio)
        keys, values = k[:, head].double(), v[:, head].double()
        for first in range(0, length, block):
            rows = slice(first, min(first + block, length))
            seen = rows.stop if causal else length
            queries = q[rows, heads].double() * head_dim**-0.5
            scores = (queries.transpose(0, 1).reshape(-1, head_dim) @ keys[:seen].T).view(ratio, -1, seen)
            if causal:
                hidden = positions[first:seen] > positions[rows, None]
                scores[:, :, first:].masked_fill_(hidden, float("-inf"))
            maximum = scores.amax(dim=2, keepdim=True)
            weights = scores.sub_(maximum).exp_()
            total = weights.sum(dim=2, keepdim=True)
            out = (weights.view(-1, seen) @ values[:seen]).view(ratio, -1, head_dim) / total
            wanted[rows, heads] = out.transpose(0, 1)
            wanted_lse[rows, heads] = (maximum + total.log()).squeeze(2).T
    return wanted, wanted_lse


def _library(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """cuDNN's output ``[n, Hq, D]``; FlashAttention-2's below 256 tokens, as cuDNN plans each shape for long."""
    ratio = q.shape[1] // k.shape[1]
    parts = [part.transpose(0, 1)[None].contiguous() for part in (q, *(x.repeat_interleave(ratio, 1) for x in (k, v)))]
    backends = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]
    backends = [*(backends if len(q) >= 256 else reversed(backends)), SDPBackend.MATH]
    with sdpa_kernel(backends, set_priority=True):
        return scaled_dot_product_attention(*parts, is_causal=causal)[0].transpose(0, 1)
