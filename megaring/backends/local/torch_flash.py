"""The FlashAttention-2 kernels inside torch, for GPUs; packed calls.

Torch's cuDNN attention is faster on long dense sequences, but builds a plan for every new combination of lengths,
and here every step has new ones.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from megaring.backends.local.segments import Segments

NAME = "torch's flash attention"


def refusal(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why torch's flash kernels cannot run here, or None."""
    if device.type != "cuda":
        return "it needs a GPU"
    if not torch.backends.cuda.is_flash_attention_available():
        return "this torch was built without it"
    if torch.cuda.get_device_capability(device)[0] < 8:
        return "it needs an Ampere GPU or a later one"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"it has no {dtype}"
    if head_dim % 8 or head_dim > 256:
        return "it needs a head dimension up to 256 that 8 divides"
    return None


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: Segments, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See the package's docstring."""
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q,
        k,
        v,
        segments.cu_q,
        segments.cu_k,
        segments.max_q,
        segments.max_k,
        0.0,  # dropout
        causal,
        False,  # debug mask
        scale=scale,
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
    seed = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of a dropout that there is not
    with _deterministic() if deterministic else contextlib.nullcontext():
        return torch.ops.aten._flash_attention_backward(
            dout,
            q,
            k,
            v,
            out,
            lse.t().contiguous(),
            segments.cu_q,
            segments.cu_k,
            segments.max_q,
            segments.max_k,
            0.0,  # dropout
            causal,
            seed,
            torch.empty(0, device=q.device),
            scale=scale,
        )


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    """The kernel takes no argument for it and reads torch's global switch."""
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
