"""The one attention function: checks its arguments, picks a backend, calls it."""

from __future__ import annotations

import functools
import logging
import math
import sys
from numbers import Real
from types import ModuleType

import torch
import torch.distributed as dist

from buddyring import Shards
from megaring.backends import Request, choose
from megaring.device_shards import DeviceShards, to_device

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

logger = logging.getLogger(__name__)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    shards: Shards | DeviceShards,
    *,
    group: dist.ProcessGroup | None = None,
    backend: str = "auto",
    softmax_scale: float | None = None,
    causal: bool = True,
    deterministic: bool = False,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention over each whole sequence of a step, from this rank's packed rows of it.

    q: ``[t, Hq, D]``; k, v: ``[t, Hkv, D]``, any ``Hkv`` that divides ``Hq``; fp64, fp32, bf16 or fp16, strided or not.
    Rows come in the order of ``shards``; ``t`` is ``shards.num_tokens`` or ``shards.rows``. Rows past the tokens belong
    to no sequence: they come out 0 and take no gradient, whatever they hold.
    shards: ``placement.shards(rank)`` or its ``to_device``, which saves a look-up. Its groups must be aligned.
    group: processes of the rank domain, rank ``i`` of the group being rank ``i`` of the placement; None is the default
    group, or no communication at all with a placement for one rank. All its ranks must make the same calls, forward
    and backward, in the same order, those without tokens too. Waits are bounded by the timeout that the group was
    made with (``init_process_group`` or ``new_group``: 30 minutes for Gloo, 10 for NCCL, unless told otherwise).
    backend: ``auto`` (the fastest that can take the call; the log says which, and why none faster), ``fused`` (Hopper,
    forward only: under ``torch.no_grad``), ``ring`` or ``reference``. softmax_scale: positive, ``D ** -0.5`` by
    default. causal: whether a query sees only its own and earlier positions of its sequence. deterministic: bit-equal
    results from run to run at a fixed placement.

    Returns ``out [t, Hq, D]`` in the inputs' type and, with ``return_lse``, the log-sum-exp ``[t, Hq]`` of the scaled
    scores (natural logarithm, fp32, or fp64 for fp64 inputs, not differentiable). A query without keys gives 0 and
    -inf. Raises TypeError or ValueError before any communication for arguments that do not fit.
    """
    _check_tensors(q, k, v)
    if not isinstance(shards, DeviceShards):
        shards = to_device(shards, q.device)
    _check_shards(q, shards)
    for name, flag in (("causal", causal), ("deterministic", deterministic), ("return_lse", return_lse)):
        if not isinstance(flag, bool):  # a string such as "no" would count as true
            raise TypeError(f"{name} is {flag!r} ({type(flag).__name__}); give True or False")
    if softmax_scale is None:
        softmax_scale = q.shape[2] ** -0.5
    elif isinstance(softmax_scale, bool) or not isinstance(softmax_scale, Real):
        raise TypeError(f"softmax_scale is {softmax_scale!r} ({type(softmax_scale).__name__}); give a number")
    if not 0 < softmax_scale < math.inf:  # kernels mask before they scale: -inf times a negative number is no mask
        raise ValueError(f"softmax_scale is {softmax_scale}; it must be positive and finite")
    request = Request(q, k, v, shards, _domain(shards.shards, group), float(softmax_scale), causal, deterministic)
    choice = choose(backend, request)
    _say(choice.name, choice.refusals)
    out, lse = choice.module.attend(request)
    return (out, lse) if return_lse else out


@functools.cache
def _say(name: str, refusals: tuple[str, ...]) -> None:
    """Log a choice the first time it is made."""
    logger.info("attention backend: %s%s", name, f" (not {'; not '.join(refusals)})" if refusals else "")


def _check_tensors(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} must be a tensor, not {type(x).__name__}")
        if x.layout != torch.strided:
            raise TypeError(f"{name} has layout {x.layout}; attention takes dense (strided) tensors")
        if x.dim() != 3:
            raise ValueError(f"{name} must have shape [tokens, heads, head_dim], not {tuple(x.shape)}")
        if x.dtype not in DTYPES:
            raise TypeError(f"{name} is {x.dtype}; attention takes fp64, fp32, bf16 or fp16")
        if x.dtype != q.dtype:
            raise TypeError(f"{name} is {x.dtype} but q is {q.dtype}; they must be the same")
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device} but q is on {q.device}; they must be the same")
    if k.shape != v.shape:
        raise ValueError(f"k and v must have the same shape, not {tuple(k.shape)} and {tuple(v.shape)}")
    if k.shape[0] != q.shape[0]:
        raise ValueError(f"q has {q.shape[0]} rows but k and v have {k.shape[0]}; they must be the same")
    if k.shape[2] != q.shape[2]:
        raise ValueError(f"q has head dimension {q.shape[2]} but k and v have {k.shape[2]}; they must be the same")
    if q.shape[2] == 0:
        raise ValueError("the head dimension is 0")
    heads, kv_heads = q.shape[1], k.shape[1]
    if kv_heads == 0 or heads == 0 or heads % kv_heads:
        raise ValueError(f"{heads} query heads cannot share {kv_heads} KV heads; the second must divide the first")


def _check_shards(q: torch.Tensor, shards: DeviceShards) -> None:
    host = shards.shards
    if shards.device != q.device:
        raise ValueError(f"shards are on {shards.device} but q is on {q.device}; use to_device(shards, q.device)")
    if q.shape[0] not in (host.rows, host.num_tokens):
        raise ValueError(
            f"q, k and v have {q.shape[0]} rows, but rank {host.rank} holds {host.num_tokens} tokens "
            f"in {host.rows} rows of this placement"
        )
    if not host.aligned:
        raise ValueError(
            "this placement is not aligned: attention needs groups whose size is a power of two that divides the "
            "ranks and whose start is a multiple of the size; plan with another scheduler"
        )


def _domain(shards: Shards, group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """The group to communicate in, checked against the placement; None when there is nothing to communicate."""
    if group is None:
        if shards.ranks == 1:
            return None
        if not dist.is_initialized():
            raise ValueError(f"the placement has {shards.ranks} ranks, but torch.distributed is not initialized")
        group = dist.group.WORLD
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    if rank < 0:
        raise ValueError("this process is not in the group given to attention")
    if (size, rank) != (shards.ranks, shards.rank):
        raise ValueError(
            f"the shards are those of rank {shards.rank} of {shards.ranks}, but this process is rank {rank} of {size} "
            "in the group; give the group of the rank domain"
        )
    return None if size == 1 else group


class _CallableModule(ModuleType):
    """Importing this module sets ``megaring.attention`` to it, where callers expect the function: so it is both."""

    __call__ = staticmethod(attention)


sys.modules[__name__].__class__ = _CallableModule
