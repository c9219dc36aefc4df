"""Calibration on real ranks: measured once, the same everywhere, kept and used again; the cost model takes it."""

from __future__ import annotations

from dataclasses import asdict

from rollout_case import MODEL, make_runner

from megaring.megatron import parallel
from megaring.rollout.assess import candidates
from megaring.rollout.blocks import History
from megaring.rollout.microbenchmarks import calibrate
from megaring.rollout.worker import cost_group


def measured(rank, world_size, path):
    runner = make_runner(world_size, MODEL)
    first = calibrate(runner, path)
    assert not runner.ledger.requests
    again = calibrate(runner, path)
    costs = candidates(cost_group(runner, again), runner.layout, [History(0, 0, 100)], [1])
    parallel.stop()
    return first, again, {name: (each.seconds, each.misfit) for name, each in costs.items()}


def test_a_machine_is_measured_once(pool, tmp_path):
    (first, again, costs), other = pool.run(2, measured, tmp_path / "rates.json")
    assert first == again == other[0] == other[1]
    assert first.machine.endswith(", 2 ranks, float64")
    assert all(value > 0 for name, value in asdict(first.constants).items() if name != "overlap")
    assert first.constants.projection_flops > 1e8
    assert all(seconds > first.constants.step_overhead and not misfit for seconds, misfit in costs.values())
