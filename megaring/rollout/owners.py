"""Which rank owns a request's history under DP and DOP, in every layout: owners outlive switches."""

from __future__ import annotations

from collections.abc import Sequence

from megaring.rollout.blocks import History
from megaring.rollout.layout import PAGE


def choose_owner(projected: Sequence[int], capacity: int | Sequence[int], tokens: int) -> int | None:
    """The owner of a new request that will grow to ``tokens`` tokens, or None where no rank has room for it.

    ``projected``: by rank, the tokens that its live requests will grow to; ``capacity``: what a rank's pool holds, one
    figure or one per rank. The rank with the most room left takes it, of equal ones the lowest.
    """
    limits = [capacity] * len(projected) if isinstance(capacity, int) else capacity
    room = [limit - used for used, limit in zip(projected, limits, strict=True)]
    best = max(range(len(room)), key=lambda rank: (room[rank], -rank))
    return best if room[best] >= tokens else None


def rebalance(histories: Sequence[History], ranks: int, tolerance: float = 0.25) -> dict[int, int]:
    """New owners, by request, that even out the cached tokens of owners; for ``rebalanced`` in ``blocks.py``.

    Nothing moves while the fullest is within ``tolerance`` of the mean. Requests of an owner that share pages move as
    one; every move brings the fullest owner and the emptiest closest together, until no move helps; of two that do so
    equally well the smaller moves.
    """
    units = _units(histories)
    owner = [unit[0].owner for unit in units]
    size = [_tokens(unit) for unit in units]
    loads = [0] * ranks
    for rank, tokens in zip(owner, size, strict=True):
        loads[rank] += tokens
    moved: dict[int, int] = {}
    mean = sum(loads) / ranks
    while max(loads) > (1 + tolerance) * mean:
        full, empty = loads.index(max(loads)), loads.index(min(loads))
        fitting = [i for i in range(len(units)) if owner[i] == full and 0 < size[i] < loads[full] - loads[empty]]
        if not fitting:
            break
        best = max(fitting, key=lambda i: (min(size[i], loads[full] - loads[empty] - size[i]), -size[i]))
        owner[best] = empty
        loads[full] -= size[best]
        loads[empty] += size[best]
        moved.update({each.request: empty for each in units[best]})
    was = {each.request: each.owner for each in histories}
    return {request: rank for request, rank in moved.items() if rank != was[request]}


def _tokens(unit: Sequence[History]) -> int:
    """Tokens of requests of one owner, with shared pages counted once."""
    live = {each.request for each in unit}
    orphans = {(origin, page) for each in unit for page, origin in enumerate(each.origins) if origin not in live}
    return sum(max(0, each.length - PAGE * len(each.origins)) for each in unit) + PAGE * len(orphans)


def _units(histories: Sequence[History]) -> list[list[History]]:
    """Histories in groups that move as one: those of an owner that share a page, directly or through others."""
    parent = list(range(len(histories)))

    def root(index: int) -> int:
        while parent[index] != index:
            index = parent[index]
        return index

    first: dict[tuple[int, int], int] = {}
    for index, each in enumerate(histories):
        for origin in {*each.origins, each.request}:  # whoever has any page that a request wrote has its first one
            parent[root(index)] = root(first.setdefault((each.owner, origin), index))
    units: dict[int, list[History]] = {}
    for index, each in enumerate(histories):
        units.setdefault(root(index), []).append(each)
    return list(units.values())
