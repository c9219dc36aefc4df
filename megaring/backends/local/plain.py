"""Attention written out in torch operations, for what no library kernel takes (fp32 and fp64 on GPUs). Slow."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from megaring.backends.local.segments import Segments
from megaring.backends.precision import wide

NAME = "plain torch operations"
SCORES = 2**25  # scores held at a time; longer segments are cut along their queries


def refusal(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """None: it runs anywhere."""
    return None


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: Segments, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See the package's docstring. The result is fp32, or fp64 for fp64 inputs."""
    dtype = wide(q.dtype)
    out = torch.empty(q.shape, dtype=dtype, device=q.device)
    lse = torch.empty(q.shape[:2], dtype=dtype, device=q.device)
    for block in _blocks(segments, q.shape[1]):
        scores = _scores(q, k, block, causal, scale)
        block_lse = scores.logsumexp(dim=-1)
        probabilities = _exp(scores, block_lse)
        out[block.queries] = torch.einsum("hgqk,khd->qhgd", probabilities, v[block.keys].to(dtype)).flatten(1, 2)
        lse[block.queries] = block_lse.flatten(0, 1).t()
    return out, lse


def backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    segments: Segments,
    causal: bool,
    scale: float,
    deterministic: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See the package's docstring. The results are fp32, or fp64 for fp64 inputs; always deterministic."""
    dtype = wide(q.dtype)
    dq, dk, dv = (torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (q, k, v))
    kv_heads = k.shape[1]
    for block in _blocks(segments, q.shape[1]):
        grouped = (kv_heads, q.shape[1] // kv_heads)
        block_q, block_dout, block_out = (
            x[block.queries].to(dtype).unflatten(1, grouped) for x in (q, dout, out)
        )  # [queries, Hkv, Hq / Hkv, D]
        block_lse = lse[block.queries].t().unflatten(0, grouped)  # [Hkv, Hq / Hkv, queries]
        block_k, block_v = k[block.keys].to(dtype), v[block.keys].to(dtype)
        probabilities = _exp(_scores(q, k, block, causal, scale), block_lse)
        dp = torch.einsum("qhgd,khd->hgqk", block_dout, block_v)
        delta = (block_dout * block_out).sum(dim=-1).permute(1, 2, 0)
        ds = probabilities * (dp - delta[..., None]) * scale
        dq[block.queries] = torch.einsum("hgqk,khd->qhgd", ds, block_k).flatten(1, 2)
        dk[block.keys] += torch.einsum("hgqk,qhgd->khd", ds, block_q)
        dv[block.keys] += torch.einsum("hgqk,qhgd->khd", probabilities, block_dout)
    return dq, dk, dv


@dataclass(frozen=True)
class _Block:
    queries: slice
    keys: slice
    first: int  # index of the first query inside its segment


def _blocks(segments: Segments, heads: int) -> Iterator[_Block]:
    start_q = start_k = 0
    for length_q, length_k in zip(segments.lengths_q, segments.lengths_k, strict=True):
        step = max(1, SCORES // (heads * length_k))
        for first in range(0, length_q, step):
            queries = slice(start_q + first, start_q + min(first + step, length_q))
            yield _Block(queries, slice(start_k, start_k + length_k), first)
        start_q, start_k = start_q + length_q, start_k + length_k


def _scores(q: torch.Tensor, k: torch.Tensor, block: _Block, causal: bool, scale: float) -> torch.Tensor:
    """Scaled scores ``[Hkv, Hq / Hkv, queries, keys]``, -inf where a key is not seen."""
    dtype = wide(q.dtype)
    queries = q[block.queries].to(dtype).unflatten(1, (k.shape[1], -1))
    scores = torch.einsum("qhgd,khd->hgqk", queries, k[block.keys].to(dtype)) * scale
    if causal:
        rows = torch.arange(block.first, block.first + scores.shape[2], device=q.device)
        columns = torch.arange(scores.shape[3], device=q.device)
        scores = scores.masked_fill(columns > rows[:, None], float("-inf"))
    return scores


def _exp(scores: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    return torch.exp(scores - lse[..., None])
