"""From an actual batch to the scheduler's candidates."""

from dataclasses import replace

import numpy as np
import pytest
from rollout_shapes import V2_LITE, random_histories

from megaring.rollout.assess import Group, candidates, misfit, passage
from megaring.rollout.blocks import History, PageTable
from megaring.rollout.calibration import Constants
from megaring.rollout.cost import Batch, step_stages
from megaring.rollout.footprint import rank_bytes
from megaring.rollout.gpus import GPUS
from megaring.rollout.layout import CP, DP, LAYOUTS, TP
from megaring.rollout.recipes import SHAPES
from megaring.rollout.replay import gain
from megaring.rollout.scheduler import Policy, Scheduler

RATES = Constants(5e14, 4e14, 4e12, 3e12, 3e11, 2e-5, step_overhead=1e-3)
GROUP = Group(V2_LITE, 4, memory=10 * 2**30, reserve=2**20, constants=RATES)


def test_costs_are_those_of_the_model():
    histories = [History(i, i % 4, 1000 + i) for i in range(6)]
    found = candidates(GROUP, TP, histories, [1, 1, 0, 1, 1, 0])
    batch = Batch(*map(np.array, ([0, 1, 3, 0], [1001, 1002, 1004, 1005], [1] * 4)))
    for name, layout in LAYOUTS.items():
        assert found[name].seconds == step_stages(V2_LITE, layout, 4, batch, RATES).seconds
        assert not found[name].misfit
    assert found["TP"].exposed == 0


def test_fit_counts_the_tokens_that_the_step_appends():
    histories = [History(0, 1, 70), History(1, 1, 70, origins=(0, 0))]
    after = PageTable.from_histories([History(0, 1, 71), History(1, 1, 71, origins=(0,))], 4)
    assert len(after) == 3  # whoever appends has copied the partly filled page
    used = rank_bytes(V2_LITE, DP, after)
    exact = replace(GROUP, memory=max(used) + GROUP.reserve)
    assert not candidates(exact, DP, histories, [1, 1])["DP"].misfit
    short = candidates(replace(exact, memory=exact.memory - 1), DP, histories, [1, 1])
    assert "would hold" in short["DP"].misfit


def test_a_full_rank_is_named():
    table = PageTable.from_histories([History(0, 2, 64)], 4)
    assert misfit(replace(GROUP, memory=0), DP, table).startswith("rank 2 would hold")
    assert misfit(GROUP, DP, table) == ""


def test_passages_that_have_no_room():
    table = PageTable.from_histories(random_histories(2, 4), 4)
    larger = max(max(rank_bytes(V2_LITE, layout, table)) for layout in (TP, CP))
    tight = replace(GROUP, memory=larger + GROUP.reserve)
    found = candidates(tight, TP, random_histories(2, 4), [0] * 9, forced="CP")
    assert not found["CP"].misfit
    assert "of one layer in transit" in found["CP"].no_passage
    decision = Scheduler(TP, Policy(forced="CP")).decide(found)
    assert (decision.action, decision.reason) == ("defer", found["CP"].no_passage)


def test_exposure_of_a_passage():
    table = PageTable.from_histories([History(i, i % 4, 64 * 512) for i in range(8)], 4)
    step = 27 * 1e-3 + RATES.step_overhead
    way = passage(GROUP, DP, CP, table, step, early=False)
    assert way.blocking == pytest.approx(27 * way.transfer)
    assert way.exposed == pytest.approx(way.transfer)  # every other layer hides behind a millisecond
    assert passage(GROUP, DP, CP, table, step).exposed == 0
    slow = passage(GROUP, DP, TP, table, 27 * 1e-5 + RATES.step_overhead, early=False)
    assert slow.exposed == pytest.approx(slow.transfer + 26 * (slow.transfer - 1e-5))
    early = passage(GROUP, DP, TP, table, 27 * 1e-5 + RATES.step_overhead)
    assert slow.exposed - early.exposed == pytest.approx(26 * 1e-5)  # under the step before, but for its first layer


def test_an_idle_batch_has_candidates_too():
    found = candidates(GROUP, CP, [], [])
    assert {each.seconds for each in found.values()} == {RATES.step_overhead}


def test_the_way_is_worked_out_where_it_may_be_taken():
    histories = [History(i, i % 4, 64 * 4096) for i in range(8)]
    rows = [1] * 8
    rates = replace(RATES, link_bandwidth=1e9, collective_latency=1e-7)
    slow = replace(GROUP, memory=100 * 2**30, constants=rates)
    found = candidates(slow, TP, histories, rows)
    by_cost = sorted(found, key=lambda name: found[name].seconds)
    cheaper, dearer = by_cost[: by_cost.index("TP")], by_cost[by_cost.index("TP") + 1 :]
    assert "CP" in cheaper
    assert found["CP"].exposed > 0
    assert all(found[name].exposed == 0 for name in dearer)
    settled = candidates(slow, LAYOUTS[by_cost[0]], histories, rows)
    assert {each.exposed for each in settled.values()} == {0}
    assert candidates(slow, LAYOUTS[by_cost[0]], histories, rows, forced="TP")["TP"].exposed > 0
    assert all(each.misfit for each in candidates(replace(slow, memory=0), TP, histories, rows).values())


def test_a_full_layout_is_left_though_it_is_the_cheapest():
    histories = [History(i, owner, 64 * 8) for i, owner in enumerate([0, 0, 0, 0, 1, 1, 2, 3])]
    later = PageTable.from_histories([replace(each, length=each.length + 1) for each in histories], 4)
    rates = replace(RATES, link_bandwidth=1e9, collective_latency=1e-7)
    tight = Group(V2_LITE, 4, max(rank_bytes(V2_LITE, DP, later)) - 1, 0, rates)
    found = candidates(tight, DP, histories, [1] * 8)
    assert min(found, key=lambda name: found[name].seconds) == "DP"
    assert [name for name in found if found[name].misfit] == ["DP"]
    assert found["CP"].exposed > 0  # worked out, as any way out may be taken
    assert Scheduler(DP).decide(found).reason.startswith("DP no longer fits: rank 0")


@pytest.mark.parametrize("model", ["deepseek-v3", "qwen3-30b-a3b"])
def test_a_draining_rollout_is_served_no_slower_than_in_the_best_fixed_layout(model):
    shape = replace(SHAPES[model], weight_bytes=1, kv_bytes=1)
    group = Group(shape, 8, 100 * 2**30, 2**30, GPUS["H200"].nominal().constants)
    outputs = np.minimum(np.random.default_rng(0).exponential(6000, 256).astype(int) + 256, 60000)
    outputs[:2] = 120000  # most requests end early, two stay
    running = [History(i, i % 8, 4096) for i in range(256)]
    scheduler, stride = Scheduler(DP, Policy(min_dwell=0)), 1024  # steps between two looks
    costs, chosen, exposed = [], [], 0.0
    while running:
        found = candidates(group, scheduler.layout, running, [1] * len(running))
        decision = scheduler.decide(found)
        assert not found[decision.layout].misfit
        exposed += found[decision.layout].exposed if decision.action == "switch" else 0
        costs.append({name: stride * each.seconds for name, each in found.items()})
        chosen.append(decision.layout)
        running = [replace(each, length=each.length + stride) for each in running]
        running = [each for each in running if each.length - 4096 < outputs[each.request]]
    total = gain(costs, chosen)
    assert len(set(chosen)) > 1
    assert exposed > 0
    assert total.chosen + exposed <= min(total.fixed.values())
    assert total.chosen + exposed <= 1.01 * total.ideal
