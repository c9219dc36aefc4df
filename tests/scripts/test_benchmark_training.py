"""The training benchmark: what it keeps of each run, how it resumes, and one small comparison on CPUs."""

import importlib
import json
from dataclasses import replace
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
SMALL = [
    *("--recipe", "recipes/tiny_cpu.yaml", "--token-budget", "2048", "--lengths", "freelaw", "--steps", "4"),
    *(
        "--",
        "--num-layers",
        "1",
        "--hidden-size",
        "64",
        "--moe-ffn-hidden-size",
        "64",
        "--vocab-size",
        "257",
        "--lr-warmup-iters",
        "1",
    ),
]


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("benchmark_training")


class Launches:
    """Stands in for ``run_bounded``: writes the metrics of four steps. ``fail``: the runs that end badly after one."""

    def __init__(self):
        self.made, self.fail = [], set()

    def __call__(self, command, log, timeout):
        out = Path(command[command.index("--output-dir") + 1])
        self.made.append(out.name)
        off = 1.01 if "uniform" in out.name else 1.0
        same = {"step_s": 1.0, "mfu": None, "memory_gib": 2.0, "token_imbalance": 0.1, "attention_imbalance": 0.2}
        lines = [{"kind": "train", "loss": loss * off, "tokens_per_s": 100 - loss, **same} for loss in (5, 4, 3, 2)]
        failed = out.name in self.fail
        out.mkdir()
        (out / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines[: 1 if failed else 4]))
        return "boom" if failed else None


@pytest.fixture
def launches(script, monkeypatch):
    launches = Launches()
    machine = importlib.import_module("training_results").Machine(gpu=None, torch="2", megatron_core="0", python="3")
    monkeypatch.setattr(script, "run_bounded", launches)
    monkeypatch.setattr(script, "this_machine", lambda: (machine, 0))
    return launches


def rows(path):
    return json.loads(path.read_text())["rows"]


def test_every_run_is_written_as_it_ends(script, launches, tmp_path, monkeypatch):
    output = tmp_path / "results" / "training.json"
    original, seen = script.run_bounded, []

    def watch(*arguments):
        seen.append(len(rows(output)) if output.exists() else 0)
        return original(*arguments)

    monkeypatch.setattr(script, "run_bounded", watch)
    assert script.main(["--output", str(output), *SMALL]) == 0
    assert launches.made == ["freelaw_1_buddyring", "freelaw_2_buddyring", "freelaw_2_megatron", "freelaw_2_uniform"]
    assert seen == [0, 1, 2, 3]
    last = rows(output)[-1]
    assert (last["steps"], last["tokens_per_s"], last["first_loss"]) == (4, 98.0, 5.05)
    assert [row["loss_difference"] for row in rows(output)] == [None, 0.0, 0.0, pytest.approx(0.01)]
    record = json.loads(output.read_text())
    assert record["settings"]["steps"] == 4
    assert "--num-layers 1" in record["commands"][0]


def test_a_resumed_benchmark_makes_what_failed_and_what_is_new(script, launches, tmp_path, capsys):
    output = tmp_path / "training.json"
    launches.fail = {"freelaw_1_buddyring"}
    argv = ["--output", str(output), "--schedulers", "uniform", *SMALL]
    assert script.main(argv) == 1
    assert "failed after 1 steps: boom" in capsys.readouterr().out
    # Nothing to compare with: the other run's losses must not become the standard.
    assert [(row["gpus"], row["loss_difference"]) for row in rows(output)] == [(1, None), (2, None)]
    launches.fail, launches.made = set(), []
    argv[argv.index("uniform") :] = ["uniform", "local", *SMALL]
    assert script.main(["--resume", *argv]) == 0
    assert launches.made == ["freelaw_1_buddyring", "freelaw_2_local"]
    assert "freelaw  2 GPU uniform" in capsys.readouterr().out
    found = {(row["gpus"], row["scheduler"]): row["loss_difference"] for row in rows(output)}
    assert found == {(1, "buddyring"): None, (2, "uniform"): pytest.approx(0.01), (2, "local"): 0.0}
    assert len(json.loads(output.read_text())["commands"]) == 2


def test_losses_that_are_off_and_runs_that_stop_early_are_failures(script, launches, tmp_path):
    argv = ["--output", str(tmp_path / "a.json"), "--schedulers", "uniform", "--tolerance", "0.005", *SMALL]
    assert script.main(argv) == 1
    argv = ["--output", str(tmp_path / "b.json"), "--schedulers", "buddyring", *SMALL]
    argv[argv.index("--steps") + 1] = "5"
    assert script.main(argv) == 1
    assert {row["error"] for row in rows(tmp_path / "b.json")} == {"it ended well, but recorded 4 of 5 steps"}


def test_results_of_other_settings_are_left_alone(script, launches, tmp_path, capsys):
    output = tmp_path / "training.json"
    argv = ["--output", str(output), *SMALL]
    script.main(argv)
    before = output.read_bytes()
    other = list(argv)
    other[other.index("--steps") + 1] = "6"
    for wrong, part in (
        (argv, "exists: give --resume to add what it lacks"),
        (["--resume", *other], "holds runs with steps 4, this is 6"),
        (["--resume", *argv, "--lr", "1"], "holds runs with extra"),
    ):
        assert script.main(wrong) == 2
        assert part in capsys.readouterr().err
    assert output.read_bytes() == before
    output.write_text("{}")
    assert script.main(["--resume", *argv]) == 2
    assert "is not a file of this script" in capsys.readouterr().err


def test_more_ranks_than_gpus_are_refused(script, launches, tmp_path, monkeypatch, capsys):
    machine, _ = script.this_machine()
    monkeypatch.setattr(script, "this_machine", lambda: (replace(machine, gpu="H200"), 1))
    assert script.main(["--gpus", "2", "--output", str(tmp_path / "x.json"), *SMALL]) == 2
    assert "--gpus 2: this machine has 1" in capsys.readouterr().err


@pytest.mark.launch
def test_two_cpu_processes_train_like_one(script, tmp_path):
    output = tmp_path / "training.json"
    argv = ["--output", str(output), "--schedulers", "buddyring", "--timeout", "240", "--tolerance", "1e-5", *SMALL]
    assert script.main(argv) == 0, rows(output)
    machine = json.loads(output.read_text())["settings"]["machine"]
    assert machine["torch"].startswith("2.") and machine["megatron_core"]
    one, two = rows(output)
    assert one["error"] is None and two["error"] is None
    assert one["losses"] == pytest.approx(two["losses"], rel=1e-5)
    assert two["last_loss"] < two["first_loss"]
    assert two["attention_imbalance"] < 0.5
