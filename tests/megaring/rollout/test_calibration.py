"""Calibrations: measured by given benchmarks, kept by machine, refused when broken."""

import json
from dataclasses import asdict, replace

import pytest

from megaring.errors import UserError
from megaring.rollout.calibration import Calibration, Constants, calibrated, load, load_all, measure, save

RATES = Constants(5e14, 4e14, 4e12, 3e12, 3e11, 2e-5, step_overhead=1e-3, overlap=0.25)


def benchmarks(**changes):
    return {name: (lambda value=value: value) for name, value in {**asdict(RATES), **changes}.items()}


def test_measure_runs_every_benchmark_once():
    calls = []
    made = measure("box", {n: (lambda n=n: calls.append(n) or asdict(RATES)[n]) for n in reversed(asdict(RATES))})
    assert calls == list(asdict(RATES))  # in the order of the fields, whatever the order given
    assert (made.machine, made.constants, made.origin) == ("box", RATES, "measured by microbenchmarks")
    assert made.made.endswith("+00:00")
    few = {n: b for n, b in benchmarks().items() if n not in ("overlap", "step_overhead")}
    assert measure("box", few).constants == replace(RATES, overlap=0.0, step_overhead=0.0)


def test_benchmarks_that_are_missing_or_unknown_are_named():
    given = benchmarks()
    del given["kv_bandwidth"]
    with pytest.raises(ValueError, match="missing microbenchmarks: kv_bandwidth"):
        measure("box", given)
    with pytest.raises(ValueError, match="unknown microbenchmarks: tea"):
        measure("box", {**benchmarks(), "tea": lambda: 1.0})


@pytest.mark.parametrize(
    ("name", "value"),
    [("link_bandwidth", 0.0), ("attention_flops", float("nan")), ("overlap", 1.5), ("step_overhead", -1.0)],
)
def test_constants_out_of_range_are_named(name, value):
    with pytest.raises(ValueError, match=f"{name} is"):
        measure("box", benchmarks(**{name: value}))


def test_calibrations_are_kept_by_machine(tmp_path):
    path = tmp_path / "new" / "calibration.json"
    assert load("a", path) is None
    first = Calibration("a", RATES, "measured", "2026-01-01T00:00:00+00:00")
    second = Calibration("b", replace(RATES, overlap=0.0), "measured", "")
    assert save(first, path) == path
    save(second, path)
    assert load_all(path) == {"a": first, "b": second}
    save(replace(first, origin="again"), path)
    assert load("a", path).origin == "again"
    assert load("c", path) is None
    assert [each.name for each in path.parent.iterdir()] == ["calibration.json"]  # no parts are left behind


def test_a_machine_is_measured_once(tmp_path):
    path = tmp_path / "calibration.json"
    first = calibrated("a", benchmarks(), path)
    assert first.constants == RATES
    assert calibrated("a", {}, path) == first  # nothing is measured again
    assert calibrated("b", benchmarks(overlap=0.0), path).constants.overlap == 0
    assert set(load_all(path)) == {"a", "b"}


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"machines": []}'])
def test_other_files_are_refused(tmp_path, text):
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(UserError, match=r"other\.json is not a calibration file"):
        load("a", path)
    with pytest.raises(UserError, match="not a calibration file"):
        save(Calibration("a", RATES, "x"), path)
    assert path.read_text() == text


def test_entries_that_cannot_be_used_are_refused(tmp_path):
    path = tmp_path / "calibration.json"
    save(Calibration("a", RATES, "x"), path)
    content = json.loads(path.read_text())
    content["machines"]["a"]["constants"]["kv_bandwidth"] = -1
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match="kv_bandwidth is -1"):
        load_all(path)
    with pytest.raises(UserError, match="Is a directory"):
        load_all(tmp_path)


def test_table_shows_every_constant_in_its_unit():
    lines = Calibration("box", RATES, "measured", "today").lines()
    assert lines[0] == "box: measured (today)"
    shown = {line.split()[0]: line.split()[1:3] for line in lines[2:]}
    assert set(shown) == set(asdict(RATES))
    assert shown["projection_flops"] == ["500", "TFLOP/s"]
    assert shown["collective_latency"] == ["20", "us"]
