"""Owners: chosen by room, rebalanced without parting what shares pages."""

import pytest
from rollout_shapes import random_histories

from megaring.rollout.blocks import History, PageTable, rebalanced
from megaring.rollout.owners import choose_owner, rebalance


def loads(histories, ranks):
    """Tokens on every owner, shared pages once."""
    table = PageTable.from_histories(histories, ranks)
    return (table.owners * table.tokens[:, None]).sum(axis=0).tolist()


def test_the_emptiest_rank_takes_a_request():
    assert choose_owner([300, 100, 100, 200], 1000, 500) == 1
    assert choose_owner([300, 100, 100, 200], [1000, 1000, 2000, 1000], 500) == 2
    assert choose_owner([900, 900], 1000, 101) is None  # 200 tokens are free, on two ranks
    assert choose_owner([900, 900], 1000, 100) == 0


def test_a_drained_owner_gets_requests_back():
    histories = [History(i, 0, 1000) for i in range(8)]
    moves = rebalance(histories, 4)
    assert loads(rebalanced(histories, moves), 4) == [2000] * 4
    assert len(moves) == 6


def test_balanced_owners_stay():
    histories = [History(i, i % 2, 1000 + i) for i in range(8)]
    assert rebalance(histories, 2) == {}
    assert rebalance([], 4) == {}
    assert rebalance([History(0, 1, 5000)], 4) == {}  # one request cannot be divided


def test_requests_that_share_pages_move_together():
    histories = [History(0, 0, 640), *(History(i, 0, 700, origins=(0,) * 10) for i in (1, 2)), History(3, 0, 500)]
    moves = rebalance(histories, 2)
    assert moves == {3: 1}  # the samples of one prompt are one unit, and the larger one
    orphans = [History(i, 0, 640, origins=(9, 9)) for i in (1, 2)] + [History(3, 0, 640), History(4, 0, 640)]
    owners = {each.request: each.owner for each in rebalanced(orphans, rebalance(orphans, 2))}
    assert owners[1] == owners[2]
    assert owners[3] == owners[4] != owners[1]


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_rebalancing_never_makes_it_worse(ranks):
    for seed in range(20):
        histories = random_histories(seed, ranks, requests=20)
        after = rebalanced(histories, rebalance(histories, ranks, tolerance=0.1))
        assert sum(loads(after, ranks)) <= sum(loads(histories, ranks))  # less where copies of a page meet
        assert max(loads(after, ranks)) <= max(loads(histories, ranks))
