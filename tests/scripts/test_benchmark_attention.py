import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
NAMES = ("attention_batches", "attention_tables", "attention_plot", "attention_suites", "benchmark_attention")


@pytest.fixture(scope="module")
def scripts():
    """The script's modules by their names; forgotten afterwards."""
    sys.path.insert(0, str(SCRIPTS))
    try:
        yield SimpleNamespace(**{name.removeprefix("attention_"): __import__(name) for name in NAMES})
    finally:
        sys.path.remove(str(SCRIPTS))
        for name in NAMES:
            sys.modules.pop(name, None)


def batches_file(folder, **changes):
    made = [
        {
            "distribution": "arxiv",
            "tokens": 100,
            "batch": i,
            "lengths": [60 + i, 40 - i],
            "baseline_ms": {"fwd": 2.0, "bwd": 2.0},
        }
        for i in range(2)
    ]
    made[1] |= changes
    path = folder / "batches.json"
    path.write_text(json.dumps({"batches": made}))
    return path


# What is measured


def test_batches_of_a_file_and_of_our_own(scripts, tmp_path):
    read = scripts.batches.read_batches(batches_file(tmp_path))
    assert [each.lengths for each in read] == [(60, 40), (61, 39)] and read[0].baseline_ms == {"fwd": 2.0, "bwd": 2.0}
    own = scripts.batches.own_batches([1024, 2048], 3)
    assert len(own) == 6 * 2 * 3 and all(sum(each.lengths) == each.tokens for each in own)
    assert any(length % 512 for each in own for length in each.lengths) and own[0].baseline_ms == {}
    cells = scripts.batches.cells([*read, *own], ["arxiv"], [100, 1024])
    assert [(cell.label, len(cell.batches)) for cell in cells] == [("file arxiv 0K", 2), ("own arxiv 1K", 3)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lengths": [60, 41]}, "batch 1 of arxiv does not hold 100 tokens"),
        ({"lengths": [100, 0]}, "does not hold"),
        ({"lengths": None}, "is no file of batches: TypeError"),
    ],
)
def test_a_broken_file_is_named(scripts, tmp_path, changes, message):
    with pytest.raises(scripts.batches.BatchesError, match=message):
        scripts.batches.read_batches(batches_file(tmp_path, **changes))


def test_the_shared_batches_are_understood(scripts):
    path = SCRIPTS.parents[1] / "shared" / "data" / "attention_batches.json"
    if not path.exists():
        pytest.skip("the measured batches are not beside this checkout")
    read = scripts.batches.read_batches(path)
    cells = scripts.batches.cells(read)
    assert len(read) == 90 and len(cells) == 15 and {len(cell.batches) for cell in cells} == {6}
    stated = {(b["distribution"], b["tokens"], b["batch"]): b for b in json.loads(path.read_text())["batches"]}
    for each in read:
        there = stated[each.distribution, each.tokens, each.index]
        about = scripts.suites.about(each, "fused", "buddyring", scripts.suites.Placement.from_groups([4], 1, [(0, 1)]))
        assert about["gflop"] * 1e9 == pytest.approx(there["flops_forward"], rel=2e-3)
        assert about["baseline_ms"] == there["baseline_ms"]["fwd"]
        placed = scripts.suites.Placement.from_groups([4], 1, [(0, 1)])
        about = scripts.suites.about(each, "fused", "buddyring", placed, scripts.suites.BACKWARD)
        assert about["gflop"] * 1e9 == pytest.approx(2.5 * there["flops_forward"], rel=2e-3)
        assert about["baseline_ms"] == there["baseline_ms"]["bwd"] and about["pass"] == "bwd"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["ranks"], "nothing to measure"),
        (["ranks", "--batches", "nowhere.json"], "nowhere.json is no file of batches"),
        (["virtual", "--own", "1", "--tokens", "1024", "--rounds", "1"], "--rounds must be at least 2"),
        (["shapes", "--variant", "x"], "--variant: 'x' is no variant"),
    ],
)
def test_options_that_cannot_work(scripts, capsys, argv, message):
    with pytest.raises(SystemExit):
        scripts.benchmark_attention.parse(argv)
    assert message in capsys.readouterr().err


def test_the_direction_chooses_contenders_and_the_reference(scripts, monkeypatch):
    asked = []
    suites = scripts.suites
    for name in ("fused", "libraries", "fused_backward", "backward_libraries"):
        monkeypatch.setattr(suites, name, lambda *args, name=name, **options: asked.append((name, len(args), options)))
    for direction, reference in (("fwd", 589.0), ("bwd", 530.0)):
        options = scripts.benchmark_attention.parse(["shapes", "--pass", direction])
        assert options.reference == reference
        values = suites.Values(6, torch.device("cpu"), options)
        values.ours("f 1", suites.Placement.from_groups([6], 1, [(0, 1)]), heads_per_task=1)
        values.libraries((6,))
    one = {"heads_per_task": 1}
    assert asked == [
        ("fused", 4, one),
        ("libraries", 3, {}),
        ("fused_backward", 5, one),
        ("backward_libraries", 4, {}),
    ]
    assert scripts.benchmark_attention.parse(["shapes", "--reference", "600"]).reference == 600.0
    title = scripts.plot._series("shapes", [{"shape": "1 x 8192", "pass": "bwd", "contender": "fused", "tflops": 1.0}])
    assert title[0].startswith("Backward, 32 query")


# How it is told


def row(batch, executor="fused", scheduler="buddyring", **more):
    made = {
        "cell": "file arxiv 32K",
        "batch": batch,
        "executor": executor,
        "scheduler": scheduler,
        "gpus": 2,
        "gflop": 4000.0,
        "median_ms": 4.0,
        "normalised_ms": 5.0,
        "attention_imbalance": 0.01 * batch,
    }
    return {**made, **more}


ROWS = [
    row(0, speedup=1.25),
    row(0, "ring", "uniform", median_ms=6.0),
    row(0, "fused", "local", error="it splits nothing") | {"median_ms": 8.0},
    row(1, speedup=0.8, median_ms=12.0),
    {"cell": "file arxiv 32K", "cudnn_tflops": 600.0, "rounds": []},
    row(0, cell="own stdlib 32K"),
]


def test_cells_are_summed_and_those_too_slow_named(scripts, capsys):
    first, second = scripts.tables.summaries(ROWS)
    assert (first.batches, first.speedup) == (2, pytest.approx(1.0))
    assert first.tflops == pytest.approx(8000 / 16 / 2) and first.normalised_tflops == pytest.approx(8000 / 10 / 2)
    assert first.others == (("ring", "uniform", 1.5), ("fused", "local", 2.0)) and first.attention_imbalance == 0.01
    assert second.speedup is None
    scripts.tables.print_cells(ROWS)
    shown = capsys.readouterr().out
    assert "over the baselines of 2 batches: 1.000x; cells below 0.98x: none" in shown
    assert "ring uniform 1.50" in shown and "fused with local is refused: it splits nothing" in shown
    scripts.tables.print_cells([row(0, speedup=0.9, wrong=True, difference=0.5)])
    shown = capsys.readouterr().out
    assert "cells below 0.98x: file arxiv 32K (0.900x)" in shown and "differs by 5.0e-01" in shown


SHAPE_ROWS = [
    {"shape": "1 x 8192", "contender": "fused", "tflops": 666.4, "speed": 1.0951},
    {"shape": "1 x 8192", "contender": "cudnn", "tflops": 608.0, "speed": 1.0},
    {"shape": "16 x 4096", "contender": "fused", "tflops": 595.0, "speed": None},
    {"shape": "1 x 8192", "rounds": []},
]
VIRTUAL_ROWS = [
    row(i, ranks=8, sequences=5, split=1, virtual_ms=2.0, serial_ms=1.0 + i, of_serial=0.5 * (1 + i)) for i in range(2)
]


def test_shapes_and_virtual_ranks_are_told(scripts, capsys):
    scripts.tables.print_shapes(SHAPE_ROWS)
    shown = capsys.readouterr().out
    assert "666 (1.095x)" in shown and "608 (1.000x)" in shown
    assert shown.splitlines()[-1].split() == ["cudnn", "608", "(1.000x)", "-"]
    scripts.tables.print_virtual(VIRTUAL_ROWS)
    assert "geometric mean over 2 batches: 0.707 of the serial speed" in capsys.readouterr().out


@pytest.mark.parametrize(("suite", "rows"), [("ranks", ROWS), ("shapes", SHAPE_ROWS), ("virtual", VIRTUAL_ROWS)])
def test_pictures(scripts, tmp_path, suite, rows):
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    scripts.plot.draw(suite, rows, tmp_path / "new" / "picture.png")
    assert (tmp_path / "new" / "picture.png").read_bytes()[:4] == b"\x89PNG"


# The suite for several ranks, with the ring in the kernel's place and a clock in the GPU's


def ranks_suite(rank, world_size, argv):
    sys.path.insert(0, str(SCRIPTS))
    import attention_suites as suites
    from benchmark_attention import parse

    from megaring.kernels.checks import executors, race

    backward = "bwd" in argv
    ms = {"cudnn 1 x 32768": 10.0, "0 fused buddyring": 1.0, "0 ring uniform": 3.0}

    def timed(contender, calls, ranks):
        contender.run()
        return ms.get(contender.name, 2.0) * (1 + rank)  # rank 1 is slower

    with pytest.MonkeyPatch.context() as patch:
        rate = 530e10 if backward else 589e10
        patch.setattr(suites, "_cudnn", lambda device, options: [race.Contender(suites.CUDNN, lambda: None, rate)])
        patch.setitem(executors.RUN, "fused", executors.RUN["ring"])
        patch.setitem(executors.RUN, "gather", lambda q, k, v, shards: q)  # wrong
        patch.setitem(executors.DIFFERENTIATE, "fused", executors.DIFFERENTIATE["ring"])
        patch.setitem(executors.DIFFERENTIATE, "gather", lambda q, k, v, gradient, shards: lambda: (gradient, v, k))
        patch.setattr(race, "_timed", timed)
        patch.setattr(race, "gpu_state", lambda device: None)
        patch.setattr(torch.cuda, "synchronize", lambda: None)
        return list(suites.run_ranks(parse(argv), torch.device("cpu"), world_size))


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_a_cell_is_measured_on_all_ranks(pool, scripts, tmp_path, direction):
    argv = ["ranks", "--batches", str(batches_file(tmp_path)), "--tokens", "100", "--rounds", "2"]
    argv += ["--schedulers", "buddyring", "uniform", "--pass", direction]
    one, two = pool.run(2, ranks_suite, argv, timeout=120)
    assert json.dumps(one) == json.dumps(two)
    (rows,) = one
    by_name = {(each["batch"], each["executor"], each["scheduler"]): each for each in rows if "executor" in each}
    assert set(by_name) == {
        (1, "fused", "buddyring"),
        *((0, "fused", each) for each in ("buddyring", "uniform")),
        *((0, executor, each) for executor in ("ring", "gather") for each in ("buddyring", "uniform")),
    }
    ours = by_name[0, "fused", "buddyring"]
    # cuDNN took 20 ms on the slower rank, half the reference's rate: so would everything on the reference machine.
    assert ours["median_ms"] == 2.0 and ours["normalised_ms"] == pytest.approx(1.0)
    assert ours["speedup"] == pytest.approx(2.0) and ours["tflops"] == pytest.approx(ours["gflop"] / 2.0 / 2)
    assert by_name[0, "ring", "uniform"]["median_ms"] == 6.0
    assert {name[1] for name, each in by_name.items() if each["wrong"]} == {"gather"}
    assert {each["pass"] for each in rows[:-1]} == {direction}
    assert rows[-1]["cudnn_tflops"] == pytest.approx((530 if direction == "bwd" else 589) / 2)


def test_no_race_begins_after_the_time_is_up(pool, scripts, tmp_path):
    argv = ["ranks", "--batches", str(batches_file(tmp_path)), "--tokens", "100", "--seconds", "-1"]
    assert pool.run(1, ranks_suite, argv) == [[]]
