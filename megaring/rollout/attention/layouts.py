"""One layer's attention under each layout: rows in, rows out, the same on all ranks on both sides.

``rows [N, hidden]`` are normed and equal on all ranks; so is the result. Every rank, also one that owns nothing, takes
part in every collective. ``kind`` is the layer's GQA or MLA.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from megaring.rollout.attention.paged import append, attend, merge
from megaring.rollout.attention.segments import Segments
from megaring.rollout.batch import Batch
from megaring.rollout.layout import CP, DOP, DP, TP, Layout
from megaring.rollout.pages import Pages
from megaring.rollout.ranks import Ranks
from megaring.rollout.rotary import Rotary
from megaring.rollout.targets import Targets


@dataclass(frozen=True, eq=False)
class Layer:
    """What the attention of one layer works with in one step. ``groups``: the cache head groups held here."""

    index: int
    kind: Any
    pages: Pages
    groups: range
    batch: Batch
    rotary: Rotary
    ranks: Ranks


def tensor_parallel(layer: Layer, rows: torch.Tensor) -> torch.Tensor:
    """TP: own heads of all rows over their whole histories; one all-reduce."""
    queries, entries = layer.kind.project_sharded(rows, layer.rotary)
    _append(layer, layer.batch.all_targets, entries)
    attended, _ = _attend(layer, queries, layer.batch.all_segments)
    return layer.ranks.all_reduce(layer.kind.output_sharded(attended.to(rows.dtype)))


def data_parallel(layer: Layer, rows: torch.Tensor) -> torch.Tensor:
    """DP: all heads of own rows over their whole histories; outputs are gathered."""
    batch = layer.batch
    queries, entries = layer.kind.project_replicated(rows[batch.own], layer.rotary.rows(batch.own))
    _append(layer, batch.own_targets, entries)
    attended, _ = _attend(layer, queries, batch.own_segments)
    out = layer.kind.output_replicated(attended.to(rows.dtype))
    return layer.ranks.gather_rows(out, batch.counts)[batch.from_owners]


def context_parallel(layer: Layer, rows: torch.Tensor) -> torch.Tensor:
    """CP: all heads of all rows over the pages held here; each rank merges a share of the rows by LSE.

    All ranks project all rows, which saves a gather of queries; the output projection is of the merged share only.
    """
    queries, entries = layer.kind.project_replicated(rows, layer.rotary)
    _append(layer, layer.batch.local_targets, entries)
    attended, lse = _attend(layer, queries, layer.batch.local_segments)
    ranks = layer.ranks
    counts = [len(rows) * (rank + 1) // ranks.size - len(rows) * rank // ranks.size for rank in range(ranks.size)]
    partial = torch.cat((attended, lse[..., None]), dim=-1)
    mine, shape = counts[ranks.rank], partial.shape[1:]
    parts = ranks.exchange(partial.split(counts), [mine * shape.numel()] * ranks.size)
    parts = torch.stack([part.view(mine, *shape) for part in parts])
    merged = merge(parts[..., :-1], parts[..., -1]).to(rows.dtype)
    return ranks.gather_rows(layer.kind.output_replicated(merged), counts)


def distributed_ownership(layer: Layer, rows: torch.Tensor) -> torch.Tensor:
    """DOP: own heads of all rows go to the rows' owners, who attend over whole histories; results come back.

    Two all-to-alls of ``(1 - 1/T) N H (d_q + d_z)`` elements together (SPLASH, section 3), with the new keys and values
    of GQA in the first. The all-reduce is complete before anybody picks rows: partial outputs of different heads have
    the same shape as whole ones.
    """
    batch, ranks = layer.batch, layer.ranks
    queries, entries = layer.kind.project_sharded(rows, layer.rotary)
    queries, entries = _to_owners(layer, queries, entries)
    _append(layer, batch.own_targets, entries)
    attended, _ = _attend(layer, queries, batch.own_segments)
    results = attended.to(rows.dtype)
    heads, width = results.shape[1] // ranks.size, results.shape[2]
    parts = ranks.exchange(results.split(heads, dim=1), [count * heads * width for count in batch.counts])
    back = torch.cat(parts).view(len(batch), heads, width)[batch.from_owners]
    return ranks.all_reduce(layer.kind.output_sharded(back))


FORWARD: dict[Layout, Callable[[Layer, torch.Tensor], torch.Tensor]] = {
    TP: tensor_parallel,
    DP: data_parallel,
    CP: context_parallel,
    DOP: distributed_ownership,
}


def _append(layer: Layer, targets: Targets, entries: torch.Tensor) -> None:
    append(layer.pages, layer.index, layer.groups, targets, entries)


def _attend(layer: Layer, queries: torch.Tensor, segments: Segments) -> tuple[torch.Tensor, torch.Tensor]:
    return attend(queries, layer.pages, layer.index, layer.groups, segments, scale=layer.kind.scale)


def _to_owners(layer: Layer, queries: torch.Tensor, entries: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries of own heads of all rows to all heads of own rows, and entries likewise: one packed all-to-all.

    Where ranks share a KV head, owner o gets it from the one in place ``o mod copies`` among them.
    """
    batch, ranks = layer.batch, layer.ranks
    mine = batch.counts[ranks.rank]
    asked = [part.flatten() for part in queries[batch.by_owner].split(batch.counts)]
    if not layer.kind.entries_are_local:
        parts = ranks.exchange(asked, [mine * queries.shape[1:].numel()] * ranks.size)
        return _join(parts, mine, queries.shape[1:]), entries[batch.own]
    made = [part.flatten() for part in entries[batch.by_owner].split(batch.counts)]
    copies = ranks.size // layer.pages.entry.groups
    sent = [
        torch.cat((query, entry)) if owner % copies == ranks.rank % copies else query
        for owner, (query, entry) in enumerate(zip(asked, made, strict=True))
    ]
    per_query, per_entry = queries.shape[1:].numel(), entries.shape[1:].numel()
    senders = [rank % copies == ranks.rank % copies for rank in range(ranks.size)]
    parts = ranks.exchange(sent, [mine * (per_query + per_entry * sends) for sends in senders])
    found = [part[: mine * per_query] for part in parts]
    new = [part[mine * per_query :] for part, sends in zip(parts, senders, strict=True) if sends]
    return _join(found, mine, queries.shape[1:]), _join(new, mine, entries.shape[1:])


def _join(parts: list[torch.Tensor], rows: int, shape: torch.Size) -> torch.Tensor:
    """``[rows, ..., heads, width]`` from flat parts of some heads each."""
    return torch.cat([part.view(rows, *shape) for part in parts], dim=-2)
