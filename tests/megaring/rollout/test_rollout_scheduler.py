"""When the scheduler switches, stays and defers, and its replay of the measured tables."""

import json

import pytest
from rollout_shapes import NO_ORACLE, ORACLE

from megaring.rollout.layout import DP, LAYOUTS, TP
from megaring.rollout.replay import gain, replay
from megaring.rollout.scheduler import Candidate, Policy, Scheduler

FREE = Policy(margin=0, min_dwell=0)


def sweeps():
    """The tables as (name, rows): one sweep over inputs or batch sizes each."""
    rows = iter(ORACLE["throughput_tables"]["rows"])
    for platform, sizes in (("B200", (8, 8, 8, 8)), ("DCU", (8, 8, 9, 9)), ("H200", (7, 7, 8, 7))):
        for number, size in enumerate(sizes):
            sweep = [next(rows) for _ in range(size)]
            assert {row["platform"] for row in sweep} == {platform}
            assert min(len({row[key] for row in sweep}) for key in ("B", "input")) == 1
            yield f"{platform} {number}", sweep


def costs(rows):
    return [{name: 1 / row[name] for name in LAYOUTS} for row in rows]


@pytest.mark.skipif(ORACLE is None, reason=NO_ORACLE)
def test_replay_without_margin_follows_every_winner():
    for name, rows in sweeps():
        for order in (rows, rows[::-1]):
            made = [each.layout for each in replay(costs(order), FREE)]
            assert made == [row["best"] for row in order], name
            assert gain(costs(order), made).realised == pytest.approx(1)


@pytest.mark.skipif(ORACLE is None, reason=NO_ORACLE)
def test_replay_of_the_draining_rollout():
    rows = [row for name, sweep in sweeps() if name == "B200 2" for row in sweep][::-1]
    assert [(row["B"], row["input"]) for row in rows][::7] == [(256, 65536), (1, 65536)]
    chosen = [each.layout for each in replay(costs(rows), FREE)]
    assert chosen == ["DOP", "DOP", "CP", "CP", "DP", "DP", "DP", "TP"]
    assert "DOP DOP CP CP DP DP DP TP" in ORACLE["throughput_tables"]["note"]


@pytest.mark.skipif(ORACLE is None, reason=NO_ORACLE)
@pytest.mark.parametrize("margin", [0.01, 0.03, 0.1, 0.3])
def test_replay_with_a_margin_is_never_more_than_it_below(margin):
    for _, rows in sweeps():
        for order in (rows, rows[::-1]):
            for start in LAYOUTS:
                for step, row in zip(
                    replay(costs(order), Policy(margin=margin, min_dwell=0), start), order, strict=True
                ):
                    assert row[step.layout] >= (1 - margin) * row[row["best"]] - 1e-12


@pytest.mark.skipif(ORACLE is None, reason=NO_ORACLE)
def test_a_perfect_switcher_is_never_slower_than_a_fixed_layout():
    for _, rows in sweeps():
        found = gain(costs(rows), [row["best"] for row in rows])
        assert 1 <= found.possible < 1.2
        assert found.chosen == found.ideal <= min(found.fixed.values())


def test_gain_counts_what_was_realised():
    steps = [{"TP": 1.0, "DP": 3.0}, {"TP": 4.0, "DP": 1.0}]
    found = gain(steps, ["TP", "TP"])
    assert (found.best_fixed, found.possible, found.realised) == ("DP", 2.0, -0.5)
    assert gain(steps, ["TP", "DP"]).realised == 1
    assert gain(steps[:1], ["TP"]).realised == 1
    with pytest.raises(ValueError, match="1 choices for 2 steps"):
        gain(steps, ["TP"])
    assert replay([], FREE) == []


def candidates(tp=1.0, dp=1.0, **changes):
    return {"TP": Candidate(tp), "DP": Candidate(dp), **changes}


def test_ties_stay():
    scheduler = Scheduler(DP, FREE)
    decision = scheduler.decide(candidates())
    assert (decision.action, decision.reason) == ("stay", "the cheapest that fits")
    assert scheduler.layout is DP
    assert Scheduler(TP, Policy(margin=0.25)).decide(candidates(tp=1.0, dp=0.75)).action == "stay"
    assert Scheduler(TP, Policy(margin=0.25)).decide(candidates(tp=1.0, dp=0.7499)).action == "switch"


def test_the_margin_grows_with_exposure_relative_to_the_step():
    policy = Policy(margin=0.01, payback_steps=10, min_dwell=0)
    prefill = Scheduler(TP, policy).decide(candidates(tp=2.0, dp=1.9, DP=Candidate(1.9, exposed=0.012)))
    assert (prefill.action, prefill.layout) == ("switch", "DP")
    assert prefill.required == 0.01
    decode = Scheduler(TP, policy).decide(candidates(tp=0.015, DP=Candidate(0.01425, exposed=0.012)))
    assert (decode.action, decode.layout) == ("stay", "TP")
    assert decode.required == pytest.approx(0.012 / (10 * 0.015))
    assert decode.reason == "DP leads by 5.0%, 8.0% asked"


def test_a_cheaper_way_is_taken_where_the_best_costs_too_much():
    policy = Policy(margin=0.01, payback_steps=1, min_dwell=0)
    found = {"TP": Candidate(1.0), "CP": Candidate(0.8, exposed=0.5), "DOP": Candidate(0.85)}
    decision = Scheduler(TP, policy).decide(found)
    assert (decision.action, decision.layout) == ("switch", "DOP")


def test_dwell_defers_and_then_lets_go():
    scheduler = Scheduler(TP, Policy(margin=0, min_dwell=2))
    seen = [scheduler.decide(candidates(tp=cost)) for cost in (2.0, 0.5, 0.5, 0.5)]
    assert [each.action for each in seen] == ["switch", "defer", "defer", "switch"]
    assert [each.layout for each in seen] == ["DP", "DP", "DP", "TP"]
    assert seen[1].wanted == "TP"
    assert seen[1].reason == "DP is kept for 2 more steps"


def test_a_layout_that_no_longer_fits_is_left_despite_margin_and_dwell():
    scheduler = Scheduler(TP, Policy(margin=0.5, min_dwell=100))
    scheduler.decide(candidates(tp=3.0))
    decision = scheduler.decide(
        {"DP": Candidate(1.0, misfit="rank 0 is full"), "TP": Candidate(1.1), "CP": Candidate(9.0)}
    )
    assert (decision.action, decision.layout) == ("switch", "TP")
    assert decision.reason == "DP no longer fits: rank 0 is full"
    assert decision.misfits == {"DP": "rank 0 is full"}


def test_without_room_for_the_way_the_switch_waits():
    scheduler = Scheduler(TP, FREE)
    blocked = candidates(tp=2.0, DP=Candidate(1.0, no_passage="rank 3 lacks 1 GiB"))
    decision = scheduler.decide(blocked)
    assert (decision.action, decision.layout, decision.wanted) == ("defer", "TP", "DP")
    assert decision.reason == "rank 3 lacks 1 GiB"
    assert scheduler.decide(candidates(tp=2.0)).action == "switch"


def test_nothing_fits():
    full = {name: Candidate(1.0, misfit=f"{name} is full") for name in ("TP", "DP")}
    decision = Scheduler(TP, FREE).decide(full)
    assert decision.action == "stay"
    assert "no layout holds this batch" in decision.reason
    assert "TP is full" in decision.reason


def test_a_layout_that_does_not_fit_never_wins():
    decision = Scheduler(TP, FREE).decide(candidates(tp=5.0, DP=Candidate(1.0, misfit="full")))
    assert (decision.action, decision.layout) == ("stay", "TP")
    assert decision.reason == "the cheapest that fits"


def test_forced_layouts_win_and_wait_for_room_only():
    scheduler = Scheduler(TP, Policy(forced="DP", margin=0.9, min_dwell=1000))
    assert scheduler.decide(candidates(dp=9.0, DP=Candidate(9.0, no_passage="no room"))).action == "defer"
    assert scheduler.decide(candidates(dp=9.0)).layout == "DP"
    assert scheduler.decide(candidates(tp=0.1, dp=9.0)).action == "stay"
    with pytest.raises(ValueError, match="no candidate for layout DP"):
        scheduler.decide({"TP": Candidate(1.0)})


def test_decisions_are_kept_and_logged():
    logged = []
    scheduler = Scheduler(TP, FREE, keep=2, log=lambda decision: logged.append(json.loads(decision.to_json())))
    for cost in (2.0, 1.0, 0.5):
        scheduler.decide(candidates(tp=cost))
    assert [each.step for each in scheduler.decisions] == [1, 2]
    assert [each["action"] for each in logged] == ["switch", "stay", "switch"]
    assert logged[2]["seconds"] == {"TP": 0.5, "DP": 1.0}
    assert logged[2]["lead"] == 0.5
    assert (logged[2]["previous"], logged[2]["layout"]) == ("DP", "TP")


def test_a_switch_that_the_worker_deferred_is_tried_again():
    scheduler = Scheduler(TP, Policy(margin=0, min_dwell=100))
    assert scheduler.decide(candidates(tp=2.0)).action == "switch"
    scheduler.hold(TP)
    again = scheduler.decide(candidates(tp=2.0))
    assert (again.action, again.previous, again.layout) == ("switch", "TP", "DP")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"margin": 1.0}, "margin is 1.0"),
        ({"payback_steps": 0}, "payback_steps is 0"),
        ({"min_dwell": -1}, "min_dwell is -1"),
        ({"forced": "EP"}, "no layout is called 'EP'"),
    ],
)
def test_policies_out_of_range_are_refused(settings, said):
    with pytest.raises(ValueError, match=said):
        Policy(**settings)


@pytest.mark.parametrize("times", [{"seconds": 0.0}, {"seconds": float("nan")}, {"seconds": 1.0, "exposed": -1.0}])
def test_times_that_cannot_be_are_refused(times):
    with pytest.raises(ValueError, match="times are finite"):
        Candidate(**times)
