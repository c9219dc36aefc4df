"""Attention in one launch of the project's own kernel: Hopper GPUs, forward only for now."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util

import torch

from megaring.backends import Request
from megaring.device_shards import DeviceShards
from megaring.kernels.arena import ArenaLayout, LocalDomain
from megaring.kernels.forward_plan import plan_forward
from megaring.kernels.megaring_forward import DevicePlan, RankCall, megaring_forward
from megaring.kernels.megaring_forward import to_device as plan_to_device

HEAD_DIMS = (64, 128)
DTYPES = (torch.bfloat16, torch.float16)


def refusal(request: Request) -> str | None:
    """Why this backend cannot take a request, or None."""
    q, k, v = request.q, request.k, request.v
    if q.device.type != "cuda" or torch.cuda.get_device_capability(q.device) != (9, 0):
        return f"it needs a Hopper GPU, and q is on {q.device}"
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None:
        return "cuda-bindings is not installed"
    if q.dtype not in DTYPES:
        return f"it takes bf16 or fp16, not {q.dtype}"
    if q.shape[2] not in HEAD_DIMS:
        return f"it takes a head dimension of 64 or 128, not {q.shape[2]}"
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        return "it is forward-only: use it under torch.no_grad, or another backend where gradients are needed"
    if (request.shards.shards.groups[:, 1] > 1).any():
        return "it does not exchange keys between processes yet, and this placement splits sequences"
    return None


def attend(request: Request) -> tuple[torch.Tensor, torch.Tensor]:
    """Output ``[t, Hq, D]`` and LSE ``[t, Hq]`` of a request that ``refusal`` takes."""
    q, k, v = (_addressable(x.detach()) for x in (request.q, request.k, request.v))
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    if len(q):
        plan = request.shards.derive(_plan, request.causal)
        stream = torch.cuda.current_stream(q.device).cuda_stream
        megaring_forward(
            _domain(q.device, stream), [RankCall(plan, q, k, v, out, lse)], softmax_scale=request.softmax_scale
        )
    return out, lse


def _plan(shards: DeviceShards, causal: bool) -> DevicePlan:
    # Nothing is split, so each rank is a domain of its own.
    plan = dataclasses.replace(plan_forward(shards.shards, causal=causal), rank=0, ranks=1)
    return plan_to_device(plan, shards.device)


@functools.cache
def _domain(device: torch.device, stream: int) -> LocalDomain:
    """The queue's words, which only one stream may use at a time."""
    return LocalDomain(1, ArenaLayout(tiles=0, kv_heads=1, head_dim=64), device)


def _addressable(x: torch.Tensor) -> torch.Tensor:
    """``x`` where the copy engine can address it (contiguous columns, 16-byte start and strides), else a copy."""
    fits = x.stride(2) == 1 and x.stride(0) % 8 == 0 and x.stride(1) % 8 == 0 and x.data_ptr() % 16 == 0
    return x if fits else x.contiguous()
