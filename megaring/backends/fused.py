"""Attention in one launch of the project's own kernel: Hopper GPUs, forward only for now.

CUDA graphs: make the call once on the stream that the capture will use, so that plan and arena exist, then capture it,
and hold the shards (``megaring.to_device``) for as long as the graph is replayed: its plan lives with them. A graph may
be replayed on any stream, but not beside another call or graph made on the same one.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util

import torch

from megaring.backends import Request
from megaring.device_shards import DeviceShards
from megaring.errors import UserError
from megaring.kernels.arena import ArenaLayout, LocalDomain
from megaring.kernels.forward_plan import plan_forward
from megaring.kernels.megaring_forward import to_device
from megaring.kernels.ops import Site

HEAD_DIMS = (64, 128)
DTYPES = (torch.bfloat16, torch.float16)


def refusal(request: Request) -> str | None:
    """Why this backend cannot take a request, or None. All ranks of a domain arrive at the same answer."""
    q, k, v = request.q, request.k, request.v
    if (reason := _machine_refusal(q.device)) is not None:
        return reason
    if q.dtype not in DTYPES:
        return f"it takes bf16 or fp16, not {q.dtype}"
    if q.shape[2] not in HEAD_DIMS:
        return f"it takes a head dimension of 64 or 128, not {q.shape[2]}"
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        return "it is forward-only until it has a backward: use it under torch.no_grad, or train with another backend"
    if request.shards.derive(_splits):
        return "it does not exchange keys between processes yet, and this placement splits sequences"
    return None


def attend(request: Request) -> tuple[torch.Tensor, torch.Tensor]:
    """Output ``[t, Hq, D]`` and LSE ``[t, Hq]`` of a request that ``refusal`` takes.

    Raises UserError at the first call of a placement inside a CUDA-graph capture, and PeerTimeout when an earlier call
    had to stop.
    """
    number = site(request.shards, causal=request.causal).number
    return torch.ops.megaring.forward(
        request.q.detach(), request.k.detach(), request.v.detach(), number, request.softmax_scale
    )


def site(shards: DeviceShards, *, causal: bool = True) -> Site:
    """What calls on the current stream need besides tensors; its number is an argument of ``megaring::forward``.

    Made at the first call for a stream and kept by the shards.
    """
    return shards.derive(_site, causal, torch.cuda.current_stream(shards.device).cuda_stream)


@functools.cache
def _machine_refusal(device: torch.device) -> str | None:
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return f"it needs a Hopper GPU, and q is on {device}"
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None:
        return "cuda-bindings is not installed; torch for CUDA 13 brings it"
    return None


def _splits(shards: DeviceShards) -> bool:
    """Whether any sequence of the step is split, held by this rank or not."""
    return any(group.size > 1 for group in shards.shards.placement.groups)


def _site(shards: DeviceShards, causal: bool, stream: int) -> Site:
    if torch.cuda.is_current_stream_capturing():
        raise UserError(
            "a CUDA graph cannot capture the first fused attention of a placement on a stream: make the same call once "
            "before the capture, on the stream that torch.cuda.graph(graph, stream=...) will use"
        )
    # Nothing is split, so each rank is a domain of its own.
    plan = dataclasses.replace(plan_forward(shards.shards, causal=causal), rank=0, ranks=1)
    return Site(to_device(plan, shards.device), _domain(shards.device, stream))


@functools.cache
def _domain(device: torch.device, stream: int) -> LocalDomain:
    """The queue's words, which only one stream may use at a time."""
    return LocalDomain(1, ArenaLayout(tiles=0, kv_heads=1, head_dim=64), device)
