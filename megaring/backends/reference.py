"""The oracle: every rank gathers all keys and values and applies a plain softmax, in fp32 (fp64 for fp64 inputs).

It holds one score per query, key and head of a sequence at a time (and all of them for the backward pass), so it is for
short sequences and for comparison. Autograd differentiates it; only the gather has a backward pass of its own.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from buddyring import Shards
from megaring.backends import Request
from megaring.backends.precision import wide
from megaring.device_shards import DeviceShards, array_to_device


def refusal(request: Request) -> str | None:
    """None: what ``megaring.attention`` lets through, the reference takes."""
    return None


def attend(request: Request) -> tuple[torch.Tensor, torch.Tensor]:
    """``(out, lse)`` of one call; see ``megaring.attention``. It is always deterministic."""
    shards, q = request.shards, request.q
    dtype = wide(q.dtype)
    tokens = shards.shards.num_tokens
    k, v = _Gather.apply(request.k[:tokens].to(dtype), request.v[:tokens].to(dtype), shards, request.group)
    # Adds nothing, but makes every rank's output depend on the gathered keys, so that one without tokens takes part in
    # the gather's backward pass.
    outs = [q[:0].to(dtype) + k[:0].sum()]
    lses = [q.new_empty((0, q.shape[1]), dtype=dtype)]
    for rows, keys, visible in _sequences(shards, request.causal):
        out, lse = _softmax_attention(q[rows].to(dtype), k[keys], v[keys], visible, request.softmax_scale)
        outs.append(out)
        lses.append(lse)
    dummies = q.shape[0] - tokens
    outs.append(q.new_zeros((dummies, *q.shape[1:]), dtype=dtype))
    lses.append(q.new_full((dummies, q.shape[1]), float("-inf"), dtype=dtype))
    return torch.cat(outs).to(q.dtype), torch.cat(lses)


def _softmax_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """``q [n, Hq, D]`` over ``k, v [L, Hkv, D]``, masked by ``visible [n, L]``: output and LSE."""
    queries = q.unflatten(1, (k.shape[1], -1))  # [n, Hkv, Hq / Hkv, D]
    scores = torch.einsum("qhgd,khd->qhgk", queries, k) * scale
    if visible is not None:
        scores = scores.masked_fill(~visible[:, None, None], float("-inf"))
    out = torch.einsum("qhgk,khd->qhgd", scores.softmax(dim=-1), v)
    return out.flatten(1, 2), scores.detach().logsumexp(dim=-1).flatten(1, 2)


def _sequences(shards: DeviceShards, causal: bool) -> list[tuple[slice, slice, torch.Tensor | None]]:
    """Per held sequence: its rows here, its tokens in the whole step, and which of these each row sees."""
    host = shards.shards
    ends = np.cumsum(host.placement.lengths)
    made = []
    for index, sequence in enumerate(host.sequences.tolist()):
        rows = slice(*host.cu_seqlens[index : index + 2].tolist())
        length = int(host.lengths[index])
        keys = slice(int(ends[sequence]) - length, int(ends[sequence]))
        visible = None
        if causal:
            visible = torch.arange(length, device=shards.device) <= shards.positions[rows, None]
        made.append((rows, keys, visible))
    return made


class _Gather(torch.autograd.Function):
    """Keys and values ``[tokens of this rank, ...]`` to ``[all tokens, ...]`` in input order; gradients add up."""

    @staticmethod
    def forward(
        ctx: Any, k: torch.Tensor, v: torch.Tensor, shards: DeviceShards, group: dist.ProcessGroup | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.shards, ctx.group = shards, group
        both = torch.stack((k, v), dim=1)
        if group is not None:
            host = shards.shards
            padded = both.new_zeros((max(host.placement.token_loads), *both.shape[1:]))
            padded[: len(both)] = both
            parts = [torch.empty_like(padded) for _ in range(host.ranks)]
            dist.all_gather(parts, padded, group=group)
            loads = host.placement.token_loads
            both = torch.cat([part[:load] for part, load in zip(parts, loads, strict=True)])
        ordered = torch.empty_like(both)
        ordered[shards.derive(_gathered_tokens)] = both
        return ordered[:, 0], ordered[:, 1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dk: torch.Tensor, dv: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        both = torch.stack((dk, dv), dim=1)
        if ctx.group is not None:
            dist.all_reduce(both, group=ctx.group)
        mine = both[ctx.shards.tokens]
        return mine[:, 0], mine[:, 1], None, None


def _gathered_tokens(shards: DeviceShards) -> torch.Tensor:
    """The step's tokens in the order of the ranks that hold them: int64."""
    host: Shards = shards.shards
    return array_to_device(np.concatenate([host.peer(rank).tokens for rank in range(host.ranks)]), shards.device)
