"""Attention that first gathers all keys and values of the split sequences, then makes one packed library call.

The plainest way to attend to split sequences, for comparison with those that hide the exchange behind the work.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import numpy as np
import torch
import torch.distributed as dist

from buddyring.shards import Shards
from megaring.backends.local.segments import Segments
from megaring.backends.precision import wide
from megaring.device_shards import DeviceShards, array_to_device


@dataclass(frozen=True, eq=False)
class GatherPlan:
    """One rank's call.

    tokens: rows that belong to sequences; split_rows: those of split sequences, which come first. most_rows: most of
    them on any rank. keys: int64, for every row of keys that the call sees, in its order, the row among those gathered
    (``rank * most_rows + row``), followed by the rank's own rows of whole sequences. segments: one per chunk, whose
    keys end with the chunk itself.
    """

    tokens: int
    split_rows: int
    most_rows: int
    keys: torch.Tensor
    segments: Segments


def plan_gather(shards: DeviceShards) -> GatherPlan:
    """The causal call of ``shards.rank``: each chunk sees its sequence up to its own end."""
    host = shards.shards
    split = [_split_rows(host.peer(rank)) for rank in range(host.ranks)]
    most = max(split)
    place = np.full(sum(host.placement.lengths), -1, dtype=np.int64)
    for rank, rows in enumerate(split):
        place[host.peer(rank).tokens[:rows]] = rank * most + np.arange(rows)
    own = host.tokens[split[host.rank] :]
    place[own] = host.ranks * most + np.arange(len(own))
    starts = np.cumsum(host.placement.lengths) - host.placement.lengths
    keys, queries = [np.empty(0, dtype=np.int64)], []
    for held, sequence in enumerate(host.sequences.tolist()):
        for first, last in host.chunks[held].tolist():
            if last > first:
                keys.append(place[starts[sequence] : starts[sequence] + last])
                queries.append(last - first)
    index = np.concatenate(keys)
    assert index.min(initial=0) >= 0, "a key that nobody holds"
    lengths = np.asarray([len(part) for part in keys[1:]], dtype=np.int64)
    return GatherPlan(
        tokens=host.num_tokens,
        split_rows=split[host.rank],
        most_rows=most,
        keys=array_to_device(index, shards.device),
        segments=Segments.build(np.asarray(queries, dtype=np.int64), lengths, shards.device),
    )


def gather_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    shards: DeviceShards,
    group: dist.ProcessGroup | None,
    kernel: ModuleType,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output ``[tokens, Hq, D]`` and LSE of ``q [t, Hq, D]`` and ``k, v [t, Hkv, D]`` in one causal call of ``kernel``.

    kernel: a family of ``megaring.backends.local`` whose causal mask ends at the last query and key of a segment when
    their numbers differ, as FlashAttention's does.
    """
    plan = shards.derive(plan_gather)
    q, k, v = (x[: plan.tokens] for x in (q, k, v))
    keys, values = (_gathered(x, plan, group).index_select(0, plan.keys) for x in (k, v))
    if plan.tokens == 0:  # it only had to take part in the gather
        return torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)
    return kernel.forward(q, keys, values, plan.segments, True, q.shape[2] ** -0.5)


def gather_gradients(
    gradient: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    shards: DeviceShards,
    group: dist.ProcessGroup | None,
    kernel: ModuleType,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dQ, dK and dV of ``gather_attention``'s ``tokens`` rows, from its results and the output's gradient.

    Keys and values are gathered again, as a model that keeps only its own rows until the backward has to; the gradients
    of all keys are added in fp32 and reduced to their owners by one reduce-scatter each.
    """
    plan = shards.derive(plan_gather)
    gradient, q, k, v = (x[: plan.tokens] for x in (gradient, q, k, v))
    keys, values = (_gathered(x, plan, group).index_select(0, plan.keys) for x in (k, v))
    dq, dk, dv = torch.empty_like(q), keys, values  # of no rows, for a rank that only has to take part
    if plan.tokens:
        scale = q.shape[2] ** -0.5
        dq, dk, dv = kernel.backward(gradient, q, keys, values, out, lse, plan.segments, True, scale, False)
    dk, dv = (_reduced(x, plan, group) for x in (dk, dv))
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _gathered(x: torch.Tensor, plan: GatherPlan, group: dist.ProcessGroup | None) -> torch.Tensor:
    """All ranks' rows of split sequences, ``most_rows`` each, then this rank's own rows of whole ones."""
    ranks = 1 if group is None else dist.get_world_size(group)
    whole = x[plan.split_rows :]
    made = x.new_empty((ranks * plan.most_rows + len(whole), *x.shape[1:]))
    made[ranks * plan.most_rows :] = whole
    if plan.most_rows:
        sent = x.new_empty((plan.most_rows, *x.shape[1:]))
        sent[: plan.split_rows] = x[: plan.split_rows]
        dist.all_gather_into_tensor(made[: ranks * plan.most_rows], sent, group=group)
    return made


def _reduced(x: torch.Tensor, plan: GatherPlan, group: dist.ProcessGroup | None) -> torch.Tensor:
    """The sums over all ranks of this rank's own rows, from gradients ``x`` of the rows ``plan.keys``."""
    ranks = 1 if group is None else dist.get_world_size(group)
    rows = (ranks * plan.most_rows, plan.tokens - plan.split_rows)
    sums = x.new_zeros((sum(rows), *x.shape[1:]), dtype=wide(x.dtype))
    shared, whole = sums.index_add_(0, plan.keys, x.to(sums.dtype)).split(rows)
    if not plan.most_rows:
        return whole
    own = sums.new_empty((plan.most_rows, *x.shape[1:]))
    dist.reduce_scatter_tensor(own, shared, group=group)
    return torch.cat([own[: plan.split_rows], whole])


def _split_rows(host: Shards) -> int:
    """Rows of the sequences that ``host`` shares with other ranks; they come first."""
    return int(host.cu_seqlens[int((host.groups[:, 1] > 1).sum())])
