"""Switches under traffic change nothing but where state lies."""

from __future__ import annotations

import numpy as np
import pytest
from mla_case import V3, make_mla_runner
from rollout_case import DENSE, MODEL, make_runner
from traffic import drive

from megaring.megatron import parallel


def traffic(rank, world_size, make, model, seed, steps=24, switching=True):
    runner = make(world_size, model)
    outcome = drive(runner, seed, steps=steps, switching=switching)
    parallel.stop()
    return outcome


def same(found, expected):
    assert found.tokens == expected.tokens
    for request, rows in expected.logits.items():
        np.testing.assert_allclose(found.logits[request], rows, rtol=0, atol=1e-12 * np.abs(rows).max())


@pytest.mark.parametrize(("seed", "sizes"), [(0, (4,)), (1, (2,))])
def test_random_switches_change_no_token(pool, seed, sizes):
    expected = pool.run(1, traffic, make_runner, MODEL, seed, switching=False)[0]
    assert sum(map(len, expected.tokens.values())) > 100
    for ranks in sizes:
        for outcome in pool.run(ranks, traffic, make_runner, MODEL, seed):
            same(outcome, expected)
            assert len(set(outcome.switches)) > 6
            assert not outcome.deferred
            assert outcome.prepared > 2
            assert (outcome.moved_bytes > 0) == (ranks > 1)


def test_random_switches_of_a_dense_model_with_two_heads_a_rank(pool):
    expected = pool.run(1, traffic, make_runner, DENSE, 5, steps=12, switching=False)[0]
    for outcome in pool.run(2, traffic, make_runner, DENSE, 5, steps=12):
        same(outcome, expected)
        assert len(set(outcome.switches)) > 4


@pytest.mark.parametrize("ranks", [2, 4])
def test_random_switches_of_mla_change_no_token(pool, ranks):
    expected = pool.run(1, traffic, make_mla_runner, V3, 2, steps=12, switching=False)[0]
    for outcome in pool.run(ranks, traffic, make_mla_runner, V3, 2, steps=12):
        same(outcome, expected)
        assert len(set(outcome.switches)) > 4
