"""Torch's flash attention for CPUs. It has no packed form: equal neighbours go as one batch, others one by one.

bf16 and fp16 are computed as fp32: without matrix instructions for them the kernel is slower in bf16 (backward 2 to 7
times on an AVX-512 machine), and partial results need no rounding before they are merged.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from megaring.backends.local.segments import Segments
from megaring.backends.precision import wide

NAME = "torch's flash attention for CPUs"


def refusal(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why the CPU's flash kernel cannot run here, or None."""
    return None if device.type == "cpu" else "it needs a CPU"


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: Segments, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See the package's docstring. The result is fp32, or fp64 for fp64 inputs."""
    out = torch.empty(q.shape, dtype=wide(q.dtype))
    lse = torch.empty(q.shape[:2], dtype=out.dtype)
    for queries, keys, count in _batches(segments):
        block_out, block_lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            _batch(q[queries], count), _batch(k[keys], count), _batch(v[keys], count), 0.0, causal, scale=scale
        )
        out[queries].unflatten(0, (count, -1)).copy_(block_out.transpose(1, 2))
        lse[queries].unflatten(0, (count, -1)).copy_(block_lse.transpose(1, 2))
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
    dq, dk, dv = (torch.empty(x.shape, dtype=wide(x.dtype)) for x in (q, k, v))
    for queries, keys, count in _batches(segments):
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            _batch(dout[queries], count),
            _batch(q[queries], count),
            _batch(k[keys], count),
            _batch(v[keys], count),
            _batch(out[queries], count),
            lse[queries].unflatten(0, (count, -1)).transpose(1, 2),
            0.0,
            causal,
            scale=scale,
        )
        for whole, rows, grad in zip((dq, dk, dv), (queries, keys, keys), grads, strict=True):
            whole[rows].unflatten(0, (count, -1)).copy_(grad.transpose(1, 2))
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
    """Packed ``[count * length, heads, d]`` as ``[count, heads, length, d]``, fp32 or fp64."""
    return rows.to(wide(rows.dtype)).unflatten(0, (count, -1)).transpose(1, 2)
