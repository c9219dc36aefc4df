"""What a worker refuses, defers, rebuilds and reports; and how it ends when a rank is lost."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from rollout_case import MODEL, VOCABULARY, make_model, make_runner, plain_logits

from megaring.megatron import parallel
from megaring.rollout.ranks import PeerLost
from megaring.rollout.step import BLOCKING, Chunk, Fork, PlanError, StepPlan
from megaring.rollout.switch import Switch

PROMPT = tuple(np.random.default_rng(5).integers(0, VOCABULARY, 400).tolist())


def step(runner, *chunks, **changes):
    """One step in the runner's present layout."""
    return runner.step(StepPlan(0, runner.layout.name, chunks, **changes))


def chunk(request, start, count, owner=0, **changes):
    return Chunk(request, owner, start, PROMPT[start : start + count], **changes)


def refusals(rank, world_size):
    runner = make_runner(world_size, MODEL)
    step(runner, chunk(1, 0, 70))
    used, wrong = runner.arena.used, []
    for plan in (
        StepPlan(1, "DP", (chunk(1, 70, 1),)),
        StepPlan(1, "TP", (chunk(1, 70, 1),), weight_version=4),
        StepPlan(1, "TP", (chunk(1, 69, 1),)),
        StepPlan(1, "TP", (chunk(1, 70, 1, owner=1),)),
        StepPlan(1, "TP", (chunk(2, 0, 1, owner=world_size),)),
        StepPlan(1, "TP", (chunk(2, 0, 0),)),
        StepPlan(1, "TP", (Chunk(2, 0, 0, (VOCABULARY,)),)),
        StepPlan(1, "TP", (chunk(1, 70, 1), chunk(1, 71, 1))),
        StepPlan(1, "TP", release=(9,)),
        StepPlan(1, "TP", forks=(Fork(3, 1, 71),)),
        StepPlan(1, "TP", (chunk(2, 0, 1),), mode="slowly"),
    ):
        with pytest.raises(PlanError) as caught:
            runner.step(plan)
        wrong.append(str(caught.value))
    assert runner.arena.used == used
    step(runner, chunk(1, 70, 1))  # still alive
    parallel.stop()
    return wrong


def test_impossible_plans_are_refused_by_all_ranks_and_change_nothing(pool):
    first, second = pool.run(2, refusals)
    assert first == second
    for message, word in zip(
        first,
        ["worker is in TP", "version 4", "starts at 69", "owner 1", "owner 2", "empty", "outside the vocabulary",
         "given tokens twice", "released", "71 of them", "slowly"],
        strict=True,
    ):  # fmt: skip
        assert word in message


def cramped(rank, world_size, units):
    """A history that lies where projections go, a switch that must wait, then one that moves it away."""
    roomy = make_runner(world_size, MODEL, memory=1 << 21)
    runner = make_runner(world_size, MODEL, memory=units * roomy.arena.unit_bytes)
    for one in (roomy, runner):
        step(one, chunk(1, 0, 320))
        step(one, chunk(2, 0, 130))
    expected = step(roomy, chunk(2, 130, 3)).logits
    pages = runner.pages.table[:, runner.ledger.slots(2)]
    in_the_way = [np.intersect1d(pages, runner.projections.foreign_units(layer)).size for layer in range(3)]
    waits = step(runner, switch_to="DP")
    with pytest.raises(PlanError, match=r"takes \d+ units on rank 0, whose arena has"):
        step(runner, chunk(3, 0, 400))
    moved = step(runner, chunk(2, 130, 3), switch_to="DP", release=(1,))
    parallel.stop()
    return in_the_way, waits.deferred, waits.layout, moved.layout, float((moved.logits - expected).abs().max())


def test_a_switch_waits_for_room_and_moves_pages_out_of_the_way(pool):
    for in_the_way, deferred, layout, after, error in pool.run(2, cramped, 32):
        assert max(in_the_way) > 0
        assert layout == "TP"
        assert "TP to DP" in deferred
        assert after == "DP"
        assert error < 1e-12


def refit(rank, world_size, layout):
    """New weights are written into the parameters; afterwards the worker is one that was made with them."""
    runner = make_runner(world_size, MODEL, layout=layout, seed=3)
    names = set(runner.decoder.model.state_dict())
    model = make_model(world_size, MODEL, 4, torch.float64)
    assert names == set(model.state_dict()), "copies must not be in a checkpoint"
    with torch.no_grad():
        for old, new in zip(runner.decoder.model.parameters(), model.parameters(), strict=True):
            old.copy_(new)
    with pytest.raises(PlanError, match="refit first"):
        step(runner, chunk(1, 0, 90), weight_version=1)
    runner.refit(1)
    with pytest.raises(PlanError, match="those in use are version 1"):
        step(runner, chunk(1, 0, 90))
    logits = step(runner, chunk(1, 0, 90, logits="all"), weight_version=1).logits.numpy()
    linear = runner.decoder.layers[0].self_attention.linear_qkv
    linear.weight.data = linear.weight.data.clone()
    with pytest.raises(RuntimeError, match="linear_qkv of layer 0 was replaced"):
        step(runner, chunk(2, 0, 1), weight_version=1)
    parallel.stop()
    return logits


@pytest.mark.parametrize("layout", ["DP", "DOP"])
def test_refit_rebuilds_what_depends_on_the_weights(pool, layout):
    (expected,) = pool.run(1, plain_logits, MODEL, [np.array(PROMPT[:90])], seed=4)[0]
    for logits in pool.run(4, refit, layout):
        np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-12 * np.abs(expected).max())


def poisoned(rank, world_size):
    """A token whose embedding is NaN spoils its request alone, also for those that get its pages afterwards."""
    runner, found = make_runner(world_size, MODEL), {}
    weight = runner.decoder.model.embedding.word_embeddings.weight
    here = 7 - rank * len(weight)
    if 0 <= here < len(weight):
        weight.data[here] = float("nan")
    clean = tuple(token if token != 7 else 8 for token in PROMPT)
    for layout in ("TP", "DP", "CP", "DOP"):
        first = step(runner, Chunk(1, 0, 0, (7,) * 90), Chunk(2, 0, 0, clean[:70]), switch_to=layout)
        second = step(runner, Chunk(3, 0, 0, clean[:70]), release=(1,))
        step(runner, release=(2, 3))
        found[layout] = (first.logits.isnan().all(dim=1).tolist(), first.logits[1], second.logits[0])
    parallel.stop()
    return found


def test_nan_stays_with_its_request(pool):
    for found in pool.run(2, poisoned):
        for nan, beside, after in found.values():
            assert nan == [True, False]
            torch.testing.assert_close(beside, found["TP"][1], rtol=0, atol=1e-11)
            torch.testing.assert_close(after, beside, rtol=0, atol=1e-11)


def expert_rows(rank, world_size, layout):
    runner = make_runner(world_size, MODEL, layout=layout)
    entered = []
    for module in runner.decoder.layers:
        module.mlp.experts.register_forward_pre_hook(lambda _, inputs: entered.append(len(inputs[0])))
    result = step(runner, chunk(1, 0, 8), chunk(2, 0, 4, owner=1), experts=True)
    parallel.stop()
    return sum(entered), result.experts.numpy()


@pytest.mark.parametrize("layout", ["TP", "DP", "CP", "DOP"])
def test_a_row_enters_each_of_its_experts_once(pool, layout):
    outcomes = pool.run(2, expert_rows, layout)
    assert sum(rows for rows, _ in outcomes) == 12 * MODEL.moe_router_topk * MODEL.num_layers
    for _, experts in outcomes:
        assert experts.shape == (12, MODEL.num_layers, MODEL.moe_router_topk)
        assert (experts == outcomes[0][1]).all()


def low_precision(rank, world_size, dtype):
    """Errors of all layouts' logits in a low precision, in one run of switches."""
    runner = make_runner(world_size, MODEL, dtype=dtype)
    found = []
    for layout in ("TP", "DOP", "CP", "DP"):
        release = (0,) if layout != "TP" else ()
        parts = [step(runner, chunk(0, 0, 100, owner=0, logits="all"), switch_to=layout, release=release)]
        parts += [step(runner, chunk(0, 100, 20, logits="all"), mode=BLOCKING)]
        found.append(torch.cat([part.logits for part in parts]).double().numpy())
    parallel.stop()
    return found


@pytest.mark.parametrize(("dtype", "worst"), [(torch.float32, 1e-5), (torch.bfloat16, 0.15)], ids=["fp32", "bf16"])
def test_low_precision(pool, dtype, worst):
    (expected,) = pool.run(1, plain_logits, MODEL, [np.array(PROMPT[:120])])[0]
    alone = pool.run(1, low_precision, dtype)[0][0]
    limit = 2 * np.sqrt(np.mean((alone - expected) ** 2))
    assert limit < worst * expected.std()
    for outcome in pool.run(2, low_precision, dtype):
        for logits in outcome:
            assert np.sqrt(np.mean((logits - expected) ** 2)) < limit


def lost(rank, world_size, switch_to):
    runner = make_runner(world_size, MODEL)
    step(runner, chunk(1, 0, 10))
    if rank == 1:  # at the first layer that is to be committed, if there is a switch
        Switch.commit = lambda *_: os._exit(3)
        if switch_to is None:
            os._exit(3)
    with pytest.raises(PeerLost, match=r"rank 0 of 2: .* failed, a peer has died"):
        step(runner, chunk(1, 10, 1), switch_to=switch_to)
    raise RuntimeError("rank 0 noticed")


@pytest.mark.parametrize("switch_to", [None, "DP"])
def test_a_rank_that_dies_ends_the_others(pool, switch_to):
    with pytest.raises(AssertionError, match="rank 0 noticed"):
        pool.run(2, lost, switch_to, timeout=30)


def disagreement(rank, world_size):
    """Ranks that have come to differ find out before anything moves."""
    runner = make_runner(world_size, MODEL)
    step(runner, chunk(1, 0, 100))
    if rank == 1:
        runner.ledger.requests[1].length -= 1
    with pytest.raises(RuntimeError, match=r"disagree about the manifest from TP to CP: \[1\] differ"):
        step(runner, switch_to="CP")
    parallel.stop()


def test_ranks_agree_on_the_manifest(pool):
    pool.run(2, disagreement)
