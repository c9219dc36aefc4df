"""Attention of new tokens over pages of cached ones, with its LSE. In torch: chunks one by one, single tokens in groups
of requests that have about as many pages.

The place of a kernel: ``attend`` has everything that one needs (queries, block tables, lengths), and its callers
nothing of torch's way.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from megaring.backends.precision import wide
from megaring.rollout.layout import PAGE
from megaring.rollout.pages import Pages

_MOST_ELEMENTS = 1 << 25  # of the cache that are gathered at once for single tokens


@dataclass(frozen=True, eq=False)
class Segment:
    """New tokens of one request and the cached pages that they see on this rank.

    ``rows``: of the queries. ``start``: position of the first. ``slots``: ``[p]`` pages held here, in order of
    positions; ``indices``: ``[p]`` their places in the request. ``length``: cached tokens, the new ones included.
    """

    rows: slice
    start: int
    slots: NDArray[np.int64]
    indices: NDArray[np.int64]
    length: int

    @property
    def tokens(self) -> int:
        """Cached tokens in the pages here; only the last page of a request can be partly filled."""
        if not len(self.indices):
            return 0
        return (len(self.indices) - 1) * PAGE + min(PAGE, self.length - PAGE * int(self.indices[-1]))

    def key_positions(self) -> NDArray[np.int64]:
        """Positions of these tokens, ``[tokens]``."""
        return (self.indices[:, None] * PAGE + np.arange(PAGE)).reshape(-1)[: self.tokens]


def attend(
    queries: torch.Tensor, pages: Pages, layer: int, groups: range, segments: Sequence[Segment], *, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention by position. queries: ``[n, heads, d_q]``, the heads of each cache head together.

    Keys are the first plane of the cache; values the last one, or, where there is one plane, the same tokens (of which
    callers keep the leading elements). Returns ``[n, heads, width]`` and the natural-log LSE ``[n, heads]``, both fp32
    (fp64 for fp64); rows without any key get 0 and -inf.
    """
    kind = wide(queries.dtype)
    out = queries.new_zeros((*queries.shape[:2], pages.entry.width), dtype=kind)
    lse = queries.new_full(queries.shape[:2], float("-inf"), dtype=kind)
    seeing = [each for each in segments if each.tokens and each.rows.start < each.rows.stop]
    for some in _alike([each for each in seeing if each.rows.stop - each.rows.start == 1], pages):
        rows = torch.tensor([each.rows.start for each in some], device=queries.device)
        out[rows], lse[rows] = _single_tokens(queries[rows].to(kind), pages, layer, groups, some, scale)
    for each in seeing:
        if each.rows.stop - each.rows.start == 1:
            continue
        cached = pages.read(layer, each.slots, groups, each.tokens).to(kind)
        asked = queries[each.rows].to(kind)
        count, heads, _ = asked.shape
        asked = asked.unflatten(1, (cached.shape[1], -1)).transpose(0, 1).flatten(1, 2)  # [cache heads, n * share, d]
        scores = (asked @ cached[0].transpose(1, 2)) * scale
        scores = scores.view(cached.shape[1], count, -1, each.tokens)
        scores.masked_fill_(_future(each, count, scores.device)[:, None], float("-inf"))
        found = torch.logsumexp(scores, dim=-1)
        weights = torch.exp(scores - found.masked_fill(found == float("-inf"), 0.0)[..., None])
        result = weights.flatten(1, 2) @ cached[-1]
        out[each.rows] = result.view(cached.shape[1], count, -1, pages.entry.width).transpose(0, 1).flatten(1, 2)
        lse[each.rows] = found.transpose(0, 1).reshape(count, heads)
    return out, lse


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
    result = weights @ cached[-1].masked_fill(hidden, 0.0)
    return result.flatten(1, 2), lse.flatten(1, 2)


def _future(segment: Segment, count: int, device: torch.device) -> torch.Tensor:
    """``[count, tokens]``: where a key comes after the query."""
    keys = torch.from_numpy(segment.key_positions()).to(device)
    return keys > torch.arange(segment.start, segment.start + count, device=device)[:, None]
