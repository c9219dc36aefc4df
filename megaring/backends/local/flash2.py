"""FlashAttention-2, where the package ``flash_attn`` (2.7 or later) is installed; packed calls."""

from __future__ import annotations

import importlib

import torch

from megaring.backends.local.segments import Segments

NAME = "FlashAttention-2"
OLDEST = (2, 7)  # the first whose LSE of a packed call is [heads, tokens]


def refusal(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why flash-attn cannot run here, or None."""
    if device.type != "cuda":
        return "it needs a GPU"
    if torch.cuda.get_device_capability(device)[0] < 8:
        return "it needs an Ampere GPU or a later one"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"it has no {dtype}"
    if head_dim % 8 or head_dim > 256:
        return "it needs a head dimension up to 256 that 8 divides"
    try:
        version = importlib.import_module("flash_attn").__version__
        importlib.import_module("flash_attn.flash_attn_interface")
    except (ImportError, OSError, RuntimeError) as error:
        return f"flash_attn cannot be imported ({error})"
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
        return f"flash_attn {version} is older than {'.'.join(map(str, OLDEST))}"
    return None


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: Segments, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See the package's docstring."""
    from flash_attn.flash_attn_interface import _flash_attn_varlen_forward

    out, lse, *_ = _flash_attn_varlen_forward(
        q,
        k,
        v,
        segments.cu_q,
        segments.cu_k,
        segments.max_q,
        segments.max_k,
        dropout_p=0.0,
        softmax_scale=scale,
        causal=causal,
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
    from flash_attn.flash_attn_interface import _flash_attn_varlen_backward

    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    _flash_attn_varlen_backward(
        dout,
        q,
        k,
        v,
        out,
        lse.t().contiguous(),
        dq,
        dk,
        dv,
        segments.cu_q,
        segments.cu_k,
        segments.max_q,
        segments.max_k,
        dropout_p=0.0,
        softmax_scale=scale,
        causal=causal,
        window_size_left=-1,
        window_size_right=-1,
        softcap=0.0,
        alibi_slopes=None,
        deterministic=deterministic,
    )
    return dq, dk, dv
