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
from megaring.kernels.megaring_forward import to_device
from megaring.kernels.ops import Site

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
    stream = torch.cuda.current_stream(request.q.device).cuda_stream
    site = request.shards.derive(_site, request.causal, stream)
    return torch.ops.megaring.forward(
        request.q.detach(), request.k.detach(), request.v.detach(), site.number, request.softmax_scale
    )


def _site(shards: DeviceShards, causal: bool, stream: int) -> Site:
    # Nothing is split, so each rank is a domain of its own.
    plan = dataclasses.replace(plan_forward(shards.shards, causal=causal), rank=0, ranks=1)
    return Site(to_device(plan, shards.device), _domain(shards.device, stream))


@functools.cache
def _domain(device: torch.device, stream: int) -> LocalDomain:
    """The queue's words, which only one stream may use at a time."""
    return LocalDomain(1, ArenaLayout(tiles=0, kv_heads=1, head_dim=64), device)
