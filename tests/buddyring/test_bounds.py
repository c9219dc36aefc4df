"""Lower bounds of the violation: true for every placement, and tight where an argument says why."""

import itertools

import brute_force
import numpy as np
import pytest
from test_search import tables

from buddyring import plan
from buddyring.distributions import batch
from buddyring.search.bounds import block_bound, filling_bound, least_violation, share_bound


@pytest.mark.parametrize("exact_tiles", [True, False])
def test_no_placement_is_below_the_bound(exact_tiles):
    forced = 0
    for lengths, ranks in brute_force.random_cases(60, exact_tiles=exact_tiles, seed=5):
        for max_group in (1, 2, 4):
            t = tables(lengths, ranks, max_group=max_group, exact_tiles=exact_tiles)
            best = brute_force.best_placement(lengths, ranks, max_group=max_group, exact_tiles=exact_tiles)
            least = best.objective[0]
            assert least_violation(t) <= least * (1 + 1e-6) + 1e-9, (lengths, max_group)
            forced += least_violation(t) > 0.99 * least > 0
    assert forced > 60  # it also says something


def test_the_share_of_one_sequence():
    # Alone on 16 ranks, 8 of them do everything: twice the mean, tolerances 10 % and 5 %.
    assert share_bound(tables([4096], 16)) == pytest.approx(0.95)
    assert share_bound(tables([4096], 8)) == 0


def test_sequences_that_do_not_divide_by_the_blocks():
    # Three equal ones and a small one in two blocks: (2, 1 + small); means 1.6, so 0.25 and 1 - 1.2 / 1.6 off.
    loads = np.array([1.0, 1.0, 1.0, 0.2]) / 1.6
    assert block_bound(loads, 2, tolerance=0.05) == pytest.approx(0.25 - 0.05)
    # With one more, the lighter block is what is furthest off: seven blocks of two, one of 1.3, mean 15.3 / 8.
    loads = np.array([1.0] * 15 + [0.3]) / (15.3 / 8)
    assert block_bound(loads, 8, tolerance=0.05) == pytest.approx(1 - 1.3 / (15.3 / 8) - 0.05)


def test_block_bound_against_all_deals():
    rng = np.random.default_rng(0)
    for _ in range(50):
        count, blocks = int(rng.integers(1, 8)), int(rng.integers(1, 4))
        loads = np.sort(rng.lognormal(0, 1, count))[::-1]
        loads *= blocks / loads.sum()
        furthest = min(
            max(abs(np.bincount(deal, weights=loads, minlength=blocks) - 1))
            for deal in itertools.product(range(blocks), repeat=count)
        )
        assert block_bound(loads, blocks, 0.0) <= furthest + 1e-12


def test_tokens_for_little_work():
    # The long one takes its block to 1.05 of the mean work; no work is left for the tokens that the block lacks.
    lengths = [8192] + [2048] * 15
    t = tables(lengths, 2, max_group=1)
    work = [n * (n + 1) / 2 for n in lengths]
    best = min(
        max(
            0.0,
            *(abs(sum(x for x, s in zip(load, sides, strict=True) if s == side) * 2 / sum(load) - 1) - tolerance
              for load, tolerance in ((lengths, 0.10), (work, 0.05)) for side in (0, 1)),
        )
        for sides in ([0] + [0] * k + [1] * (15 - k) for k in range(16))
    )  # fmt: skip
    assert 0 < filling_bound(t) <= best


@pytest.mark.parametrize("index", range(5))
def test_prolong_on_64_ranks_misses_the_tolerances_because_it_must(index):
    """Fifteen sequences of 65,536 tokens in eight blocks: one block gets a single one."""
    lengths = batch("prolong", 64 * 16384, index=index)
    placement = plan(lengths, 64)
    bound = least_violation(tables(lengths, 64))
    assert placement.violation > 0.02
    assert bound <= placement.violation <= bound + 0.011
