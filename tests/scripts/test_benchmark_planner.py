import importlib.util
import json
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "benchmark_planner.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("benchmark_planner", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_a_small_run_prints_tables_and_writes_what_it_measured(script, tmp_path, capsys):
    from buddyring import SCHEDULERS, plan
    from buddyring.distributions import NAMES, batch

    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    output, picture = tmp_path / "results" / "planner.json", tmp_path / "planner.png"
    small = "--batches 2 --large-batches 1 --repeats 2 --ranks 16 --cases 4"
    script.main([*small.split(), "--output", str(output), "--plot", str(picture)])
    record = json.loads(output.read_text())
    assert small in record["command"] and record["cores"] >= 1 and record["cpu"] and record["versions"]["numba"]
    assert [(s["distribution"], s["ranks"], s["calls"]) for s in record["speed"]] == [
        *((name, 8, 4) for name in NAMES),
        *((name, 16, 2) for name in NAMES),
    ]
    for speed in record["speed"]:
        assert 0 < speed["p50"] <= speed["p95"] <= speed["most"] and speed["best_p95"] <= speed["p95"]
    made = [plan(batch("arxiv", 131072, index=index), 8) for index in range(2)]
    row = record["quality"]["arxiv"][list(SCHEDULERS).index("buddyring")]
    assert row["token_mean"] == pytest.approx(sum(p.token_imbalance for p in made) / 2)
    assert row["shards"] == sum(p.num_shards for p in made) / 2
    assert [r["scheduler"] for r in record["quality"]["stdlib"]] == list(SCHEDULERS)
    assert [(o["exact_tiles"], o["cases"]) for o in record["optimality"]] == [(True, 4), (False, 4)]
    assert all(o["optimal"] + len(o["worse"]) == 4 for o in record["optimality"])
    shown = capsys.readouterr().out
    assert "Planning time in ms" in shown and "of 4 random cases with exact_tiles" in shown
    assert f"{row['attention_mean']:.1%} ({row['attention_worst']:.1%})" in shown
    assert picture.read_bytes()[:4] == b"\x89PNG"


def test_a_plan_that_is_not_the_best_is_counted(script, monkeypatch):
    from buddyring import plan

    monkeypatch.setattr(script, "plan", lambda lengths, ranks, **o: plan(lengths, ranks, scheduler="local", **o))
    measured = script.measure_optimality(10, exact_tiles=False)
    assert measured.optimal < 10 and len(measured.worse) == 10 - measured.optimal


def test_what_is_forced_is_beside_what_was_reached(script):
    # One sequence on 16 ranks: 8 do everything, at twice the mean and 5 % of tolerance.
    assert script.forced_violation([4096], 16) == pytest.approx(0.95)
    assert script.forced_violation([4096] * 16, 16) == 0
    speed = script.measure_speed("prolong", 64, batches=2, repeats=1)
    assert 0 < speed.forced <= speed.violation


@pytest.mark.parametrize("option", ["--batches", "--repeats", "--cases", "--large-batches"])
def test_nothing_to_measure_is_refused(script, capsys, option):
    with pytest.raises(SystemExit):
        script.parse([option, "0"])
    assert f"{option} must be at least 1" in capsys.readouterr().err
