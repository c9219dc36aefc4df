"""The one call of the planner: lengths in, placement out."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from buddyring.placement import Placement
from buddyring.problem import check_problem
from buddyring.schedulers import SCHEDULERS


def plan(
    lengths: Iterable[int],
    ranks: int,
    *,
    scheduler: str = "buddyring",
    token_tolerance: float = 0.10,
    attention_tolerance: float = 0.05,
    max_group: int = 8,
    capacity: int | None = None,
    rank_multiple: int = 1,
    tile: int = 128,
    exact_tiles: bool = False,
    target: float | None = None,
) -> Placement:
    """Give each sequence of a step a group of ranks.

    lengths: tokens per sequence, any iterable of integers. ranks: ranks of the domain, not only powers of two.
    scheduler: ``buddyring``, or one to compare with: ``local``, ``megatron``, ``uniform``, ``zeppelin``.
    token_tolerance, attention_tolerance: allowed relative deviation of a rank from the mean load.
    max_group: most ranks a sequence is split over (``uniform``, ``megatron`` and ``zeppelin`` have rules of their own).
    capacity: most tokens a rank may hold, hard, after rounding its total up to ``rank_multiple``.
    tile: tokens that stay together when a sequence is split. exact_tiles: split only where ``2 * tile * size`` divides
    the length (the rule of LiquidCP, appendix A.1). target: tokens per rank that ``megatron`` sizes its groups by
    (default half of the mean).

    The plan depends on the arguments only, so every process that calls with the same ones gets the same plan.
    Raises TypeError and ValueError for arguments that are not as stated, and CapacityError when a sequence or the
    total exceeds the capacity or no placement within it was found.
    """
    make = SCHEDULERS.get(scheduler) if isinstance(scheduler, str) else None
    if make is None:
        near = difflib.get_close_matches(str(scheduler), SCHEDULERS, n=1, cutoff=0.0)[0]
        raise ValueError(f"no scheduler {scheduler!r}; did you mean {near!r}? There are {', '.join(SCHEDULERS)}")
    if target is not None and scheduler != "megatron":
        raise ValueError(f"target is an option of the megatron scheduler; leave it out with {scheduler!r}")
    problem = check_problem(
        lengths,
        ranks,
        token_tolerance=token_tolerance,
        attention_tolerance=attention_tolerance,
        max_group=max_group,
        capacity=capacity,
        rank_multiple=rank_multiple,
        tile=tile,
        exact_tiles=exact_tiles,
        target=target,
    )
    layout = make(problem)
    return Placement.from_groups(
        problem.lengths,
        problem.ranks,
        layout.groups.tolist(),
        tile=problem.tile,
        exact_tiles=problem.exact_tiles,
        token_tolerance=problem.token_tolerance,
        attention_tolerance=problem.attention_tolerance,
        capacity=problem.capacity,
        rank_multiple=problem.rank_multiple,
        scheduler=scheduler,
        notes=layout.notes,
    )
