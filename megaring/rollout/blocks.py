"""Which blocks of attention state each rank holds under a layout: the sets K and P of SPLASH, section 2.

A KV block is (page, cache heads) and a weight block is one of the T equal slices of every projection; both are the same
in every layer, since every layer caches the same tokens. Page p of a request holds positions ``[64 p, 64 p + 64)``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from megaring.rollout.layout import HEADS, PAGE, POSITIONS, Layout, pages_of
from megaring.rollout.shape import ModelShape

_INDEX_BITS = 24  # of a page's place in its request, in the key that sorts pages; the rest is the request's number


@dataclass(frozen=True)
class History:
    """The cached tokens of one request.

    ``length`` counts them. ``origins`` names, page by page from the first, the requests that wrote the leading pages
    which are shared with them; the remaining pages are the request's own. A page that is partly filled may be shared
    too, until somebody appends to it and copies it. A request that starts over takes a new number.
    """

    request: int
    owner: int
    length: int
    origins: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class PageTable:
    """The distinct pages of a batch and the ranks that own them.

    First the pages that each request wrote itself, by request and place, then those whose writers have ended. Arrays
    over n pages: ``origin`` (the request that wrote the page), ``index`` (its place in that request), ``tokens`` (1 to
    64 that it holds), all int64, and ``owners``, bool ``[n, ranks]``: the owners of the requests that use it.
    """

    ranks: int
    origin: NDArray[np.int64]
    index: NDArray[np.int64]
    tokens: NDArray[np.int64]
    owners: NDArray[np.bool_]

    @classmethod
    def from_histories(cls, histories: Iterable[History], ranks: int) -> PageTable:
        """List the pages of ``histories``, each shared page once.

        Raises ValueError for a repeated request, an owner outside the group, more shared pages than the request has,
        and for a shared page that its users do not agree on.
        """
        rows = sorted(histories, key=lambda each: each.request)
        _check(rows, ranks)
        request, owner, length = (
            np.array([getattr(each, name) for each in rows], np.int64) for name in ("request", "owner", "length")
        )
        shared = np.array([len(each.origins) for each in rows], np.int64)
        pages = -(-length // PAGE)
        own = pages - shared
        first = np.cumsum(own) - own  # the row of each request's first own page
        writer = np.repeat(np.arange(len(rows)), own)
        index = np.arange(len(writer)) - (first - shared)[writer]
        tokens = np.minimum(PAGE, length[writer] - PAGE * index)

        user = np.repeat(np.arange(len(rows)), shared)
        wrote = np.fromiter(chain.from_iterable(each.origins for each in rows), np.int64, len(user))
        place = np.arange(len(user)) - (np.cumsum(shared) - shared)[user]
        held = np.minimum(PAGE, length[user] - PAGE * place)
        found = np.minimum(np.searchsorted(request, wrote), len(rows) - 1)
        live = (request[found] == wrote) & (shared[found] <= place) & (place < pages[found])
        row = np.where(live, first[found] + place - shared[found], 0)

        lost = np.flatnonzero(~live)  # their writers have ended, or hold fewer tokens now
        keys, leader, number = np.unique(
            (wrote[lost] << _INDEX_BITS) | place[lost], return_index=True, return_inverse=True
        )
        row[lost] = len(writer) + number
        tokens = np.concatenate([tokens, held[lost][leader]])
        _check_fill(tokens[row] == held, wrote, place)
        owners = np.zeros((len(tokens), ranks), bool)
        owners[np.arange(len(writer)), owner[writer]] = True
        owners[row, owner[user]] = True
        origin = np.concatenate([request[writer], keys >> _INDEX_BITS])
        return cls(ranks, origin, np.concatenate([index, keys & ((1 << _INDEX_BITS) - 1)]), tokens, owners)

    def __len__(self) -> int:
        return len(self.origin)

    def holders(self, layout: Layout) -> NDArray[np.bool_]:
        """Bool ``[n, ranks]``: who holds (some heads of) which page under ``layout``."""
        if layout.history == HEADS:
            return np.ones((len(self), self.ranks), bool)
        if layout.history == POSITIONS:
            return self.index[:, None] % self.ranks == np.arange(self.ranks)
        return self.owners

    def held(self, layout: Layout) -> NDArray[np.int64]:
        """Int64 ``[ranks]``: how many pages each rank holds under ``layout``."""
        if layout.history == HEADS:
            return np.full(self.ranks, len(self))
        if layout.history == POSITIONS:
            return np.bincount(self.index % self.ranks, minlength=self.ranks)
        return np.array([np.count_nonzero(self.owners[:, rank]) for rank in range(self.ranks)])

    def same_pages(self, other: PageTable) -> bool:
        """Whether both list the same pages with the same tokens; owners may differ."""
        mine, others = (self.origin, self.index, self.tokens), (other.origin, other.index, other.tokens)
        return self.ranks == other.ranks and all(map(np.array_equal, mine, others))


def held_heads(shape: ModelShape, layout: Layout, rank: int, ranks: int) -> range:
    """The cache heads of every page that ``rank`` holds: its own under TP, all of them elsewhere."""
    return shape.rank_heads(rank, ranks) if layout.history == HEADS else range(shape.cache_heads)


def held_slices(layout: Layout, rank: int, ranks: int) -> range:
    """The slices of every projection that ``rank`` holds, of the ``ranks`` that tensor parallelism cuts it into."""
    return range(rank, rank + 1) if layout.sharded_projections else range(ranks)


def rebalanced(histories: Sequence[History], owners: Mapping[int, int]) -> list[History]:
    """The same histories with other owners, by request. Raises KeyError for a request that is not among them."""
    unknown = set(owners) - {history.request for history in histories}
    if unknown:
        raise KeyError(f"requests {sorted(unknown)} have no history here")
    return [replace(history, owner=owners.get(history.request, history.owner)) for history in histories]


def _check_fill(agreed: NDArray[np.bool_], wrote: NDArray[np.int64], place: NDArray[np.int64]) -> None:
    if not agreed.all():
        other = int(np.argmin(agreed))
        raise ValueError(
            f"page {place[other]} of request {wrote[other]} is shared by requests that hold different numbers of its "
            "tokens; whoever appends to it must copy it first"
        )


def _check(histories: Sequence[History], ranks: int) -> None:
    if ranks < 1:
        raise ValueError(f"{ranks} ranks: at least 1 is needed")
    repeated = [request for request, count in Counter(each.request for each in histories).items() if count > 1]
    if repeated:
        raise ValueError(f"request {repeated[0]} is listed twice; a request has one history")
    for each in histories:
        if not 0 <= each.owner < ranks:
            raise ValueError(f"request {each.request} has owner {each.owner}; the group has ranks 0 to {ranks - 1}")
        if not 0 <= each.length <= PAGE << _INDEX_BITS:
            raise ValueError(
                f"request {each.request} has {each.length} tokens; 0 to {PAGE << _INDEX_BITS} are possible"
            )
        if len(each.origins) > pages_of(each.length):
            raise ValueError(
                f"request {each.request} shares {len(each.origins)} pages; its {each.length} tokens fill "
                f"{pages_of(each.length)}"
            )
        if any(not 0 <= number < 1 << (63 - _INDEX_BITS) for number in (each.request, *each.origins)):
            raise ValueError(f"request {each.request}: its number or one of its origins is not in [0, 2^39)")
