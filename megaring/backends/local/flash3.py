"""FlashAttention-3 (Hopper), where the package ``flash_attn_interface`` is installed; packed calls."""

from __future__ import annotations

import importlib

import torch

from megaring.backends.local.segments import Segments

NAME = "FlashAttention-3"


def refusal(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why FlashAttention-3 cannot run here, or None."""
    if device.type != "cuda":
        return "it needs a GPU"
    if torch.cuda.get_device_capability(device)[0] != 9:
        return "it needs a Hopper GPU"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"it has no {dtype}"
    if head_dim % 8 or head_dim > 256:
        return "it needs a head dimension up to 256 that 8 divides"
    try:
        importlib.import_module("flash_attn_interface")  # registers torch.ops.flash_attn_3
    except (ImportError, OSError, RuntimeError) as error:
        return f"flash_attn_interface cannot be imported ({error})"
    missing = [name for name in ("fwd", "bwd") if not hasattr(torch.ops.flash_attn_3, name)]
    return f"flash_attn_interface has no operation {missing[0]}" if missing else None


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: Segments, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See the package's docstring."""
    out, lse, *_ = torch.ops.flash_attn_3.fwd(
        q,
        k,
        v,
        cu_seqlens_q=segments.cu_q,
        cu_seqlens_k=segments.cu_k,
        max_seqlen_q=segments.max_q,
        max_seqlen_k=segments.max_k,
        softmax_scale=scale,
        is_causal=causal,
        num_splits=1,  # splitting keys adds a merge, in an order that varies
    )
    return out, lse.t()


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
    """See the package's docstring."""
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    torch.ops.flash_attn_3.bwd(
        dout,
        q,
        k,
        v,
        out,
        lse.t().contiguous(),
        dq=dq,
        dk=dk,
        dv=dv,
        cu_seqlens_q=segments.cu_q,
        cu_seqlens_k=segments.cu_k,
        max_seqlen_q=segments.max_q,
        max_seqlen_k=segments.max_k,
        softmax_scale=scale,
        is_causal=causal,
        deterministic=deterministic,
    )
    return dq, dk, dv
