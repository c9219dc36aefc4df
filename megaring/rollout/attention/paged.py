"""Attention of new tokens over pages of cached ones, with its LSE: by kernels on a GPU (``paged_gpu``), else in torch.

Torch takes chunks one by one, single tokens in groups of requests that have about as many pages. fp64 is torch's
everywhere: it is for comparisons, and the kernels do not have it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from megaring.backends.precision import wide
from megaring.rollout.attention import paged_gpu
from megaring.rollout.attention.segments import Segment, Segments
from megaring.rollout.layout import PAGE
from megaring.rollout.pages import Pages
from megaring.rollout.targets import Targets

_MOST_ELEMENTS = 1 << 25  # of the cache that are gathered at once for single tokens


def attend(
    queries: torch.Tensor, pages: Pages, layer: int, groups: range, segments: Segments, *, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention by position. queries: ``[n, heads, d_q]``, the heads of each cache head together.

    Keys are the first plane of the cache; values the last one, of which the leading ``value_width`` elements count.
    Returns ``[n, heads, value_width]`` and the natural-log LSE ``[n, heads]``, both fp32 (fp64 for fp64); rows without
    any key get 0 and -inf.
    """
    if by_kernels(queries):
        return paged_gpu.attend(queries, pages, layer, groups, segments, scale=scale)
    kind, value_width = wide(queries.dtype), pages.entry.value_width
    out = queries.new_zeros((*queries.shape[:2], value_width), dtype=kind)
    lse = queries.new_full(queries.shape[:2], float("-inf"), dtype=kind)
    seeing = [each for each in segments.items if each.tokens]
    for some in _alike([each for each in seeing if each.count == 1], pages):
        rows = torch.tensor([each.rows.start for each in some], device=queries.device)
        out[rows], lse[rows] = _single_tokens(queries[rows].to(kind), pages, layer, groups, some, scale)
    for each in seeing:
        if each.count > 1:
            asked = queries[each.rows].to(kind)
            out[each.rows], lse[each.rows] = _chunk(asked, pages, layer, groups, each, scale)
    return out, lse


def append(pages: Pages, layer: int, groups: range, targets: Targets, entries: torch.Tensor) -> None:
    """Write new tokens into their pages. entries: ``[n, planes, heads of groups, width]``, of which ``targets.rows`` go
    there.
    """
    if not len(targets.rows):
        return
    if by_kernels(entries):
        units = targets.units(pages, layer, groups)
        paged_gpu.append(pages.units, entries, targets.rows, units, targets.device_offsets)
    else:
        pages.append(layer, targets.slots, targets.offsets, groups, entries[targets.rows])


def by_kernels(rows: torch.Tensor) -> bool:
    """Whether rows like these are for the GPU kernels."""
    return rows.device.type == "cuda" and rows.dtype in paged_gpu.DTYPES


def merge(outs: torch.Tensor, lses: torch.Tensor) -> torch.Tensor:
    """Attention over the union of disjoint sets of keys: outs ``[parts, n, heads, d]``, lses ``[parts, n, heads]``.

    O = sum_p exp(LSE_p - LSE) O_p with LSE = logsumexp_p LSE_p; (0, -inf) is an empty part. Every row has a key in
    some part.
    """
    return (outs * torch.softmax(lses, dim=0)[..., None]).sum(dim=0)


def _alike(segments: Sequence[Segment], pages: Pages) -> Iterator[list[Segment]]:
    """Groups of segments whose numbers of pages are at most doubled by padding, none of too many elements."""
    ordered = sorted(segments, key=lambda each: len(each.slots))
    page = pages.entry.planes * pages.entry.heads * pages.entry.width * PAGE
    for _, group in itertools.groupby(ordered, key=lambda each: (len(each.slots) - 1).bit_length()):
        some = list(group)
        most = max(1, _MOST_ELEMENTS // (page * len(some[-1].slots)))
        yield from (some[first : first + most] for first in range(0, len(some), most))


def _single_tokens(
    queries: torch.Tensor, pages: Pages, layer: int, groups: range, segments: list[Segment], scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """``attend`` for one query ``[heads, d_q]`` of each segment. Short ones are padded with their own pages, unseen."""
    width = len(segments[-1].slots)
    slots = np.stack([np.pad(each.slots, (0, width - len(each.slots)), mode="edge") for each in segments])
    unseen = np.ones((len(segments), width * PAGE), bool)
    for row, each in zip(unseen, segments, strict=True):
        row[: each.tokens] = each.key_positions() > each.start
    hidden = torch.from_numpy(unseen).to(queries.device)[:, None, :, None]
    cached = pages.read_padded(layer, slots, groups).to(queries.dtype)
    heads = cached.shape[2]
    asked = queries.unflatten(1, (heads, queries.shape[1] // heads))
    scores = (asked @ cached[0].transpose(2, 3)) * scale
    scores.masked_fill_(hidden.transpose(2, 3), float("-inf"))
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - lse.masked_fill(lse == float("-inf"), 0.0)[..., None])
    # What a page holds beyond its tokens may be anything, and 0 x NaN is NaN.
    result = weights @ cached[-1, ..., : pages.entry.value_width].masked_fill(hidden, 0.0)
    return result.flatten(1, 2), lse.flatten(1, 2)


def _chunk(
    queries: torch.Tensor, pages: Pages, layer: int, groups: range, segment: Segment, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """``attend`` for the queries ``[count, heads, d_q]`` of one segment."""
    cached = pages.read(layer, segment.slots, groups, segment.tokens).to(queries.dtype)
    count, heads, _ = queries.shape
    queries = queries.unflatten(1, (cached.shape[1], -1)).transpose(0, 1).flatten(1, 2)  # [cache heads, n * share, d]
    scores = (queries @ cached[0].transpose(1, 2)) * scale
    scores = scores.view(cached.shape[1], count, -1, segment.tokens)
    scores.masked_fill_(_future(segment, count, scores.device)[:, None], float("-inf"))
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - lse.masked_fill(lse == float("-inf"), 0.0)[..., None])
    result = weights.flatten(1, 2) @ cached[-1, ..., : pages.entry.value_width]
    result = result.view(cached.shape[1], count, -1, pages.entry.value_width)
    return result.transpose(0, 1).flatten(1, 2), lse.transpose(0, 1).reshape(count, heads)


def _future(segment: Segment, count: int, device: torch.device) -> torch.Tensor:
    """``[count, tokens]``: where a key comes after the query."""
    keys = torch.from_numpy(segment.key_positions()).to(device)
    return keys > torch.arange(segment.start, segment.start + count, device=device)[:, None]
