"""The four attention layouts: where the projections live, and which ranks hold a request's KV history.

No torch, no megatron. Sources: SPLASH, section 2 (figure 2) and section 3 (DOP).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import permutations

PAGE = 64  # tokens that are stored, owned and moved together

HEADS, POSITIONS, OWNERS = "heads", "positions", "owners"


@dataclass(frozen=True)
class Layout:
    """Two independent choices over the same request state.

    ``sharded_projections``: each rank holds the attention projections of its query heads; otherwise all of them.
    ``history``: how the KV of a request is spread, one of

    - ``heads``: every rank has all positions of its own KV heads (the latent of MLA counts as one head);
    - ``positions``: page p of a request is on rank ``p % T``;
    - ``owners``: all of it on the rank that owns the request.
    """

    name: str
    sharded_projections: bool
    history: str

    def __str__(self) -> str:
        return self.name


TP = Layout("TP", sharded_projections=True, history=HEADS)
DP = Layout("DP", sharded_projections=False, history=OWNERS)
CP = Layout("CP", sharded_projections=False, history=POSITIONS)
DOP = Layout("DOP", sharded_projections=True, history=OWNERS)

LAYOUTS: dict[str, Layout] = {layout.name: layout for layout in (TP, DP, CP, DOP)}
SWITCHES: tuple[tuple[Layout, Layout], ...] = tuple(permutations(LAYOUTS.values(), 2))


def layout_named(name: str) -> Layout:
    """The layout called ``name``. Raises ValueError that lists the four."""
    if name not in LAYOUTS:
        raise ValueError(f"no layout is called {name!r}; choose from {', '.join(LAYOUTS)}")
    return LAYOUTS[name]


def pages_of(tokens: int) -> int:
    """Pages that ``tokens`` tokens of one request take; the last one may be partly filled."""
    return -(-tokens // PAGE)
