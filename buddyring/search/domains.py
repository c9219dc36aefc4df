"""Many ranks: sequences are dealt to aligned domains first, then each domain is planned by itself."""

from __future__ import annotations

import numpy as np

from buddyring.search.kernels.fill import deal
from buddyring.search.stages import Found, key_of, search
from buddyring.search.tables import Tables, code_arrays

DOMAIN_RANKS = 64


def search_all(t: Tables) -> Found:
    """The best placement found; above 64 ranks by domains, so that time grows as the ranks do.

    A domain is a run of whole largest groups, about ``DOMAIN_RANKS`` ranks. Sequences go to domains longest first, each
    to the one whose larger mean load stays least. Loads are compared with the mean of all ranks, not of the domain's.
    """
    if t.ranks <= DOMAIN_RANKS:
        return search(t)
    unit = 1 << (t.levels - 1)
    bounds = np.linspace(0, t.ranks // unit, -(-t.ranks // max(DOMAIN_RANKS, unit)) + 1).astype(np.int64) * unit
    domain_of = deal(t, np.diff(bounds))
    codes = np.empty(len(t.lengths), dtype=np.int64)
    for domain, (first, last) in enumerate(zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)):
        rows = np.flatnonzero(domain_of == domain)
        if not len(rows):
            continue
        part = part_of(t, rows, last - first)
        found = search(part)
        levels = part.level_of[found.codes]
        codes[rows] = t.offsets[levels] + ((part.start_of[found.codes] + first) >> levels)
    return Found(codes, key_of(t, codes))


def part_of(t: Tables, rows: np.ndarray, ranks: int) -> Tables:
    """The tables of some sequences on a domain of ``ranks``; means stay those of all ranks."""
    offsets, level_of, start_of = code_arrays(ranks, t.levels)
    return t._replace(
        ranks=ranks,
        offsets=offsets,
        level_of=level_of,
        start_of=start_of,
        lengths=t.lengths[rows],
        classes=t.classes[rows],
        held=t.held[rows],
        work=t.work[rows],
        legal=t.legal[rows],
    )
