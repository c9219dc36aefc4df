"""Rank 0 drives, the others follow: steps, refusals, refits, sleep, and the end."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from rollout_case import MODEL, VOCABULARY, make_model, make_runner, plain_logits

from megaring.megatron import parallel
from megaring.rollout.driver import Driver, follow
from megaring.rollout.layout import DP, TP
from megaring.rollout.ranks import PeerLost
from megaring.rollout.step import Chunk, PlanError, StepPlan

PROMPT = np.random.default_rng(8).integers(0, VOCABULARY, 100)


def plan(version=0, layout="DP", start=0, **changes):
    chunk = Chunk(1, 0, start, tuple(PROMPT[start : start + 50].tolist()), "all")
    return StepPlan(0, layout, (chunk,), weight_version=version, **changes)


def served(rank, world_size):
    """Logits of the prompt's halves before and after a refit, which happens in the worker's sleep."""
    runner = make_runner(world_size, MODEL, layout="DP")
    newer = make_model(world_size, MODEL, 4, torch.float64)

    def load(version):
        assert version == 1
        with torch.no_grad():
            for old, new in zip(runner.decoder.model.parameters(), newer.parameters(), strict=True):
                old.copy_(new)

    if rank:
        follow(runner, load)
        parallel.stop()
        return runner.weight_version, runner.layout.name, None
    driver = Driver(runner, load)
    old = [driver.execute(plan()).logits]
    with pytest.raises(PlanError, match="starts at 0"):
        driver.execute(plan())
    with pytest.raises(PlanError, match="1 requests are live"):
        driver.sleep()
    driver.heartbeat()
    old.append(driver.execute(plan(start=50, switch_to="TP")).logits)
    assert driver.layout is TP
    driver.execute(StepPlan(2, "TP", release=(1,), switch_to="DP"))
    memory = runner.arena.bytes.untyped_storage()
    driver.sleep()
    assert memory.size() == 0
    driver.refit(1)
    with pytest.raises(PlanError, match="sleeps"):
        driver.execute(plan(1))
    driver.wake()
    assert memory.size() == runner.arena.units * runner.arena.unit_bytes
    assert (driver.layout, driver.weight_version, driver.vocab_size) == (DP, 1, VOCABULARY)
    new = [driver.execute(plan(1)).logits, driver.execute(plan(1, start=50)).logits]
    driver.stop()
    parallel.stop()
    return 1, "DP", [torch.cat(each).numpy() for each in (old, new)]


@pytest.mark.parametrize("ranks", [1, 4])
def test_followers_do_what_rank_0_does(pool, ranks):
    outcomes = pool.run(ranks, served)
    assert {outcome[:2] for outcome in outcomes} == {(1, "DP")}
    for logits, seed in zip(outcomes[0][2], (3, 4), strict=True):
        (expected,) = pool.run(1, plain_logits, MODEL, [PROMPT], seed=seed)[0]
        np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-12 * np.abs(expected).max())


def deserted(rank, world_size):
    runner = make_runner(world_size, MODEL)
    if not rank:
        os._exit(3)
    with pytest.raises(PeerLost, match="a broadcast failed, a peer has died"):
        follow(runner)
    raise RuntimeError("the follower noticed")


def test_followers_end_with_rank_0(pool):
    with pytest.raises(AssertionError, match="the follower noticed"):
        pool.run(2, deserted, timeout=30)


def roles(rank, world_size):
    runner = make_runner(world_size, MODEL)
    with pytest.raises(ValueError, match="rank 0 drives"):
        follow(runner) if rank == 0 else Driver(runner)
    parallel.stop()


def test_roles_follow_the_ranks(pool):
    pool.run(2, roles)
