"""Switches under traffic change nothing but where state lies."""

from __future__ import annotations

import numpy as np
import pytest
from rollout_case import MODEL, make_runner
from traffic import drive

from megaring.megatron import parallel


def traffic(rank, world_size, seed, switching=True, layout="TP", memory=1 << 21):
    runner = make_runner(world_size, MODEL, layout=layout, memory=memory)
    outcome = drive(runner, seed, switching=switching)
    parallel.stop()
    return outcome


def same(found, expected):
    assert found.tokens == expected.tokens
    for request, rows in expected.logits.items():
        np.testing.assert_allclose(found.logits[request], rows, rtol=0, atol=1e-12 * np.abs(rows).max())


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("seed", [0, 1])
def test_random_switches_change_no_token(pool, ranks, seed):
    expected = pool.run(1, traffic, seed, switching=False)[0]
    assert sum(map(len, expected.tokens.values())) > 100
    for outcome in pool.run(ranks, traffic, seed):
        same(outcome, expected)
        assert len(outcome.switches) > 8
        assert not outcome.deferred
