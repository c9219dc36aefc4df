"""Sequences of fixed lengths with their fp64 gradients and a library's, so that many mixes can share them.

The sequences and their 3 key and 9 query heads are those of ``bank``. dK and dV are kept for each query head by itself;
those of a case's key head are the sum over the query heads that share it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from megaring.kernels.checks.bank import KV_HEADS, SCORE_BYTES, Kind, draw, query_numbers
from megaring.kernels.checks.gradient_calls import Tensors, least_square

CUDNN_FROM = 2048  # tokens; cuDNN plans each shape for long, and twice: shorter sequences go to FlashAttention-2
COMPARED_BYTES = 1 << 30  # fp64 gradients compared at a time
LIBRARIES = {
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "FlashAttention-2": SDPBackend.FLASH_ATTENTION,
    "plain": SDPBackend.MATH,
}

Errors = tuple[float, ...]  # of dQ, dK and dV


@dataclass(frozen=True, eq=False)
class GradientEntry:
    """One sequence of ``n`` tokens; query head ``3 a + b`` attends to key head ``a``.

    q, gradient: ``[n, 9, D]``; k, v: ``[n, 3, D]``. wanted: dQ and each query head's share of dK and dV,
    ``[n, 9, D]`` fp64. made: the same by ``library``, in the inputs' type.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    gradient: torch.Tensor
    wanted: Tensors
    made: Tensors
    library: str


class GradientBank:
    """Entries by length and kind, each made when it is first asked for and kept on ``device``."""

    def __init__(self, device: torch.device | str):
        self._device = torch.device(device)
        self._entries: dict[tuple[int, Kind], GradientEntry] = {}

    def entry(self, length: int, kind: Kind) -> GradientEntry:
        """The sequence of ``length`` tokens; its values depend on length and kind only."""
        key = (length, kind)
        if key not in self._entries:
            q, k, v, gradient = draw(length, kind, self._device)
            wanted = gradients_fp64(q, k, v, gradient, causal=kind.causal)
            self._entries[key] = GradientEntry(q, k, v, gradient, wanted, *_library((q, k, v), gradient, kind.causal))
        return self._entries[key]

    def libraries(self) -> str:
        """``cuDNN for 5 sequences, FlashAttention-2 for 9`` of the entries made so far."""
        counts = Counter(entry.library for entry in self._entries.values())
        return ", ".join(f"{name} for {count} sequences" for name, count in counts.items())


def gradient_inputs(entries: Sequence[GradientEntry], query_heads: int, kv_heads: int) -> tuple[Tensors, torch.Tensor]:
    """q, k and v of a case with those head counts and sequences, one after another, and the output's gradient."""
    queries, keys = query_numbers(query_heads, kv_heads), [head % KV_HEADS for head in range(kv_heads)]
    q, k, v, gradient = (
        torch.cat([getattr(entry, name)[:, heads] for entry in entries])
        for name, heads in (("q", queries), ("k", keys), ("v", keys), ("gradient", queries))
    )
    return (q, k, v), gradient


def gradient_squares(entry: GradientEntry, gradients: Tensors, positions: torch.Tensor) -> torch.Tensor:
    """``[3, 3]`` fp64: of dQ, dK and dV, the squared norm of our error, of the library's, and of the gradient.

    gradients: ``[m, Hq, D]`` and twice ``[m, Hkv, D]``, of the entry's tokens ``positions [m]``; sums over disjoint
    positions add up. The library's shares of dK and dV are added in fp64 and rounded to the type, as their sum has to
    be by whoever returns it.
    """
    (query_heads, head_dim), kv_heads = gradients[0].shape[1:], gradients[1].shape[1]
    ratio, numbers = query_heads // kv_heads, query_numbers(query_heads, kv_heads)
    sums = torch.zeros(3, 3, dtype=torch.float64, device=positions.device)
    step = max(1, COMPARED_BYTES // (8 * ratio * head_dim * max(1, len(positions))))
    for first in range(0, kv_heads, step):
        keys = slice(first, min(first + step, kv_heads))
        queries = slice(keys.start * ratio, keys.stop * ratio)
        heads = torch.tensor(numbers[queries], device=positions.device)
        for part, heads_here in enumerate((queries, keys, keys)):
            wanted, made = (each[part][positions[:, None], heads].double() for each in (entry.wanted, entry.made))
            if part:
                wanted, made = (each.unflatten(1, (-1, ratio)).sum(dim=2) for each in (wanted, made))
                made = made.to(entry.q.dtype).double()
            sums[part, 0] += (gradients[part][:, heads_here].double() - wanted).square().sum()
            sums[part, 1] += (made - wanted).square().sum()
            sums[part, 2] += wanted.square().sum()
    return sums


def gradient_errors(sums: torch.Tensor, heads: tuple[int, int, int], head_dim: int) -> tuple[Errors, Errors]:
    """Relative L2 errors, ours and the library's, as ``gradient_error`` gives them, from a sequence's ``squares``.

    heads: of dQ, dK and dV.
    """
    norms = [max(norm, least_square(each, head_dim)) for norm, each in zip(sums[:, 2].tolist(), heads, strict=True)]
    ours, theirs = (
        tuple((error / norm) ** 0.5 for error, norm in zip(sums[:, column].tolist(), norms, strict=True))
        for column in (0, 1)
    )
    return ours, theirs


def gradients_fp64(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gradient: torch.Tensor,
    *,
    causal: bool,
    score_bytes: int = SCORE_BYTES,
) -> Tensors:
    """dQ and each query head's share of dK and dV, ``[n, Hq, D]`` fp64, of one sequence, with a scale of ``D ** -0.5``.

    With P the probabilities and dP = dO V^T: dV = P^T dO, dS = P (dP - rowsum(P dP)), dQ = scale dS K and
    dK = scale dS^T Q (FlashAttention-2, section 2.3.2, whose rowsum(dO O) is the same sum). Rows are taken in blocks
    whose scores fill ``score_bytes``, of which four are held at a time.
    """
    length, query_heads, head_dim = q.shape
    ratio, scale = query_heads // k.shape[1], head_dim**-0.5
    dq, dk, dv = (torch.zeros(q.shape, dtype=torch.float64, device=q.device) for _ in range(3))
    block = max(1, min(length, score_bytes // (8 * ratio * length)))
    places = torch.arange(length, device=q.device)
    for head in range(k.shape[1]):
        heads = slice(head * ratio, (head + 1) * ratio)
        keys, values = k[:, head].double(), v[:, head].double()
        for first in range(0, length, block):
            rows = slice(first, min(first + block, length))
            seen = rows.stop if causal else length
            queries, slopes = (x[rows, heads].double().transpose(0, 1) for x in (q, gradient))  # [ratio, rows, D]
            scores = (queries * scale) @ keys[:seen].T
            if causal:
                scores[:, :, first:].masked_fill_(places[first:seen] > places[rows, None], float("-inf"))
            p = scores.sub_(scores.amax(dim=2, keepdim=True)).exp_()
            p /= p.sum(dim=2, keepdim=True)
            dp = slopes @ values[:seen].T
            ds = dp.sub_((p * dp).sum(dim=2, keepdim=True)).mul_(p).mul_(scale)
            dq[rows, heads] = (ds @ keys[:seen]).transpose(0, 1)
            dk[:seen, heads] += (ds.transpose(1, 2) @ queries).transpose(0, 1)
            dv[:seen, heads] += (p.transpose(1, 2) @ slopes).transpose(0, 1)
    return dq, dk, dv


def _library(inputs: Tensors, gradient: torch.Tensor, causal: bool) -> tuple[Tensors, str]:
    """A library's gradients and its name: cuDNN from ``CUDNN_FROM`` tokens on where it takes the shape.

    It gets each key head as often as it is used, so that each query head's share is to be seen.
    """
    ratio = inputs[0].shape[1] // inputs[1].shape[1]
    leaves = [
        x.repeat_interleave(ratio if i else 1, 1).transpose(0, 1)[None].contiguous().requires_grad_()
        for i, x in enumerate(inputs)
    ]
    names = [name for name in LIBRARIES if name != "cuDNN" or len(gradient) >= CUDNN_FROM]
    for name in names:
        try:
            with sdpa_kernel(LIBRARIES[name]):
                out = scaled_dot_product_attention(*leaves, is_causal=causal)
                made = torch.autograd.grad(out, leaves, gradient.transpose(0, 1)[None].contiguous())
        except RuntimeError:
            if name == names[-1]:
                raise
            continue
        break
    dq, dk, dv = (each[0].transpose(0, 1) for each in made)
    return (dq, dk, dv), name
