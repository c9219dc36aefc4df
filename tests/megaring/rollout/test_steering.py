"""What the scheduler is shown of a step is what the step then does; and the cost model steers a live engine."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from fake_model import PAGES, VOCABULARY, FakeExecutor, expected

from megaring.rollout.assess import Group, _grown
from megaring.rollout.blocks import PageTable
from megaring.rollout.calibration import Constants
from megaring.rollout.engine import Engine
from megaring.rollout.intake import EngineConfig
from megaring.rollout.layout import LAYOUTS, TP
from megaring.rollout.request import SamplingParams
from megaring.rollout.scheduler import Policy, Scheduler
from megaring.rollout.shape import MlaShape, ModelShape
from megaring.rollout.steering import by_cost, fixed, in_turn

MLA = MlaShape(q_lora_rank=None, kv_lora_rank=512, qk_nope=128, qk_rope=64, v_dim=128)
SHAPE = ModelShape("small", layers=4, hidden=1024, query_heads=16, kv_heads=16, head_dim=128, mla=MLA)
CONFIG = EngineConfig(max_context=384, max_rows=96, max_running=8, keep_prefixes=True, prepare_switches=False)


def requests():
    random = np.random.default_rng(4)
    common = random.integers(0, VOCABULARY - 1, 200).tolist()
    for number in range(8):
        prompt = [*common[: int(random.integers(1, 200))], number]
        yield prompt, SamplingParams(max_tokens=int(random.integers(1, 40)), n=1 + number % 3, seed=number)


def run(engine):
    outputs, waiting, step = {}, list(requests()), 0
    while waiting or engine.has_work:
        if waiting and step % 3 == 0:
            engine.add(*waiting.pop(0))
        step += 1
        for delta in engine.step():
            if delta.finished is not None:
                outputs[delta.request, delta.sample] = delta.finished
    return outputs


def check(outputs):
    for number, (prompt, params) in enumerate(requests()):
        for index in range(params.n):
            drawn = expected(prompt, params, number, index)
            assert outputs[number, index].token_ids == [each.token for each in drawn]


@pytest.mark.parametrize("layout", ["TP", "CP", "DOP"])
def test_the_view_of_a_step_is_what_it_does(layout):
    """Pages by rank that the view promises are those of the ledger after the step: prompts, forks, kept prefixes."""
    executor = FakeExecutor(2, layout, dict.fromkeys(PAGES, 60))
    promised = []

    def steer(view):
        check_last()
        grown = [_grown(each, rows) for each, rows in zip(view.histories, view.rows, strict=True)]
        assert sum(view.rows) == sum(len(chunk.tokens) for chunk in view.draft.chunks)
        promised.append(PageTable.from_histories(grown, 2).held(view.layout))
        return layout

    def check_last():
        if promised:
            np.testing.assert_array_equal(promised.pop(), executor.ledger.pages_held(executor.layout))

    engine = Engine(executor, replace(CONFIG, rebalance_every=0), steer=steer)
    check(run(engine))
    assert sum(len(plan.forks) for plan in executor.plans) > 6


def test_the_cost_model_steers_through_switches():
    """Rates at which prompts and short histories want other layouts than long ones; margins of 0."""
    constants = Constants(1e12, 1e12, 1e11, 1e9, 1e10, 1e-7)
    group = Group(SHAPE, 2, 1 << 40, 0, constants)
    scheduler = Scheduler(TP, Policy(margin=0.0, min_dwell=0, payback_steps=1 << 30))
    executor = FakeExecutor(2, "TP", dict.fromkeys(PAGES, 60))
    engine = Engine(executor, CONFIG, steer=by_cost(group, scheduler))
    check(run(engine))
    assert engine.metrics.switches
    followed = [decision.layout for decision in scheduler.decisions]
    assert [step.layout for step in engine.metrics.steps] == followed


def test_the_scheduler_is_told_where_the_worker_is():
    """A switch that has no room is wanted again in the next step, without a dwell."""
    constants = Constants(1e12, 1e12, 1e11, 1e9, 1e10, 1e-7)
    scheduler = Scheduler(TP, Policy(forced="DP"))
    executor = FakeExecutor(2, "TP", {**dict.fromkeys(PAGES, 60), "DP": 0})
    engine = Engine(executor, CONFIG, steer=by_cost(Group(SHAPE, 2, 1 << 40, 0, constants), scheduler))
    check(run(engine))
    assert {decision.wanted for decision in scheduler.decisions} == {"DP"}
    assert all(step.deferred and step.layout == "TP" for step in engine.metrics.steps)


def test_a_layout_of_no_name_is_refused():
    with pytest.raises(ValueError, match="no layout is called 'XP'"):
        fixed("XP")
    with pytest.raises(ValueError, match="at least 1"):
        in_turn(0)
    assert list(LAYOUTS) == [in_turn(1)(type("View", (), {"step": step})) for step in range(4)]
