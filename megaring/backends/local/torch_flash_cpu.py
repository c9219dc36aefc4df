"""Torch's flash attention for CPUs. It has no packed form: equal neighbours go as one batch, others one by one."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from megaring.backends.local.segments import Segments

NAME = "torch's flash attention for CPUs"


def refusal(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why the CPU's flash kernel cannot run here, or None."""
    return None if device.type == "cpu" else "it needs a CPU"


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: Segments, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See the package's docstring."""
    out = torch.empty(q.shape, dtype=q.dtype)
    lse = torch.empty(q.shape[:2], dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)
    for queries, keys, count in _batches(segments):
        block_out, block_lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            _batch(q[queries], count), _batch(k[keys], count), _batch(v[keys], count), 0.0, causal, scale=scale
        )
        _batch(out[queries], count).copy_(block_out)
        _batch(lse[queries, :, None], count).copy_(block_lse[..., None])
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
    """See the package's docstring. It is always deterministic."""
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype) for x in (q, k, v))
    for queries, keys, count in _batches(segments):
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            _batch(dout[queries], count),
            _batch(q[queries], count),
            _batch(k[keys], count),
            _batch(v[keys], count),
            _batch(out[queries], count),
            _batch(lse[queries, :, None], count).squeeze(-1),
            0.0,
            causal,
            scale=scale,
        )
        for whole, rows, grad in zip((dq, dk, dv), (queries, keys, keys), grads, strict=True):
            _batch(whole[rows], count).copy_(grad)
    return dq, dk, dv


def _batches(segments: Segments) -> Iterator[tuple[slice, slice, int]]:
    """Runs of neighbouring segments of equal lengths: (query rows, key rows, number of segments)."""
    first_q = first_k = 0
    for (length_q, length_k), run in itertools.groupby(zip(segments.lengths_q, segments.lengths_k, strict=True)):
        count = len(list(run))
        last_q, last_k = first_q + count * length_q, first_k + count * length_k
        yield slice(first_q, last_q), slice(first_k, last_k), count
        first_q, first_k = last_q, last_k


def _batch(rows: torch.Tensor, count: int) -> torch.Tensor:
    """Packed ``[count * length, heads, d]`` seen as ``[count, heads, length, d]``."""
    return rows.unflatten(0, (count, -1)).transpose(1, 2)
