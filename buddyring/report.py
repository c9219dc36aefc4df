"""The text that ``buddyring plan`` prints: a summary and a bar of tokens and of attention work per rank."""

from __future__ import annotations

from collections import Counter

import numpy as np

from buddyring.placement import Placement

_MOST_ROWS = 32  # ranks shown one by one; of more, the extremes


def human(count: float) -> str:
    """A count with three significant digits: 950, 12.3k, 4.56G."""
    letters = " kMGTPEZY"
    power = 0
    while count >= 999.5 and power < len(letters) - 1:
        count, power = count / 1000, power + 1
    return f"{count:.3g}{letters[power]}".strip()


def summary_lines(placement: Placement, planning_ms: float) -> list[str]:
    """What was planned and how even it came out."""
    p = placement
    lengths = np.asarray(p.lengths)
    span = f", {lengths.min():,} to {lengths.max():,} each (median {np.median(lengths):,.0f})" if len(lengths) else ""
    sizes = Counter(size for _, size in p.groups)
    where = ", ".join(f"{sizes[size]:,} {'whole' if size == 1 else f'over {size} ranks'}" for size in sorted(sizes))
    aligned = "all aligned" if p.aligned else "NOT aligned: attention refuses this placement"
    lines = [
        f"{len(p.lengths):,} sequences, {sum(p.lengths):,} tokens{span}, on {p.ranks:,} ranks by {p.scheduler}",
        f"sequences     {where or 'none'}; {p.num_shards:,} shards, {p.communication:,.0f} tokens sent",
        f"groups        {p.num_distinct_groups:,} distinct, {aligned}",
        _imbalance_line("tokens", p.token_imbalance, p.token_tolerance),
        _imbalance_line("attention", p.attention_imbalance, p.attention_tolerance),
    ]
    if p.capacity is not None:
        rows = max(p.rows(rank) for rank in range(p.ranks))
        lines.append(f"capacity      {p.capacity:,} tokens a rank; the fullest takes {rows:,}")
    lines.append(f"planned in    {planning_ms:.2f} ms")
    return lines + [f"note          {note}" for note in p.notes]


def _imbalance_line(name: str, value: float, tolerance: float) -> str:
    verdict = "within" if value <= tolerance else "OUTSIDE"
    return f"{name:<13} at most {value:.2%} from the mean, {verdict} the tolerance of {tolerance:.0%}"


def bar_lines(placement: Placement, width: int, block: str, colour: bool) -> list[str]:
    """One line per rank with its loads, their deviation from the mean and a bar of each.

    width: columns of the terminal. block: the character bars are made of. A deviation outside the tolerance is marked
    with ``!``, and printed red with ``colour``. Of more than 32 ranks the 8 with the least and the 8 with the most
    attention work are shown, least first.
    """
    p = placement
    ranks = list(range(p.ranks))
    if p.ranks > _MOST_ROWS:
        by_work = sorted(ranks, key=lambda rank: (p.attention_loads[rank], rank))
        shown: list[int | None] = [*by_work[:8], None, *by_work[-8:]]
    else:
        shown = list(ranks)
    number = max(4, len(str(p.ranks - 1)))
    fixed = number + 2 * (2 + 7 + 1 + 9 + 1)
    bar = max(8, min(40, (width - fixed) // 2))
    left = _column(p.token_loads, p.token_tolerance, bar, block, colour)
    right = _column(p.attention_loads, p.attention_tolerance, bar, block, colour)
    heading = f"{'rank':>{number}}  {'tokens':>7} {'off mean':>8}  {'':<{bar}}  {'pairs':>7} {'off mean':>8}"
    lines = [heading]
    for rank in shown:
        if rank is None:
            lines.append(f"{'...':>{number}}  {p.ranks - 16:,} ranks with attention work between these")
        else:
            lines.append(f"{rank:>{number}}  {left[rank]}  {right[rank]}".rstrip())
    return lines


def _column(loads: tuple[int, ...], tolerance: float, bar: int, block: str, colour: bool) -> list[str]:
    mean, most = sum(loads) / len(loads), max(loads)
    cells = []
    for load in loads:
        off = load / mean - 1 if mean else 0.0
        outside = abs(off) > tolerance
        text = f"{off:>+8.1%}{'!' if outside else ' '}"
        if outside and colour:
            text = f"\x1b[31m{text}\x1b[0m"
        cells.append(f"{human(load):>7} {text}{(block * round(bar * load / most if most else 0)):<{bar}}")
    return cells
