"""``megaring rollout plan``: its figures against the modules that make them, its text, and what it refuses."""

import json
import subprocess
import sys

import numpy as np
import pytest

from megaring import cli
from megaring.rollout.calibration import Calibration, Constants, save
from megaring.rollout.cost import Batch, step_stages
from megaring.rollout.footprint import Sizes
from megaring.rollout.layout import LAYOUTS, SWITCHES
from megaring.rollout.recipes import SHAPES

GIB = 2**30


def plan(capsys, *arguments):
    assert cli.main(["rollout", "plan", *arguments]) == 0
    return capsys.readouterr().out


def refused(capsys, *arguments):
    try:
        assert cli.main(["rollout", "plan", *arguments]) == 2
    except SystemExit as end:
        assert end.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    return captured.err


def test_figures(capsys):
    arguments = (
        "--model deepseek-v2-lite --ranks 4 --batch 8 --context 8192 --gpu-memory 100 --memory-fraction 0.5 --json"
    )
    found, shape = json.loads(plan(capsys, *arguments.split())), SHAPES["deepseek-v2-lite"]
    sizes = Sizes.of(shape, 4)
    room = found["usable_bytes"] - found["reserve_bytes"] - found["common_bytes"]
    assert (found["usable_bytes"], found["reserve_bytes"]) == (50 * GIB, 2 * GIB)
    assert list(found["layouts"]) == list(LAYOUTS)
    for name, each in found["layouts"].items():
        layout = LAYOUTS[name]
        assert each["projection_bytes"] + each["kv_bytes"] == sizes.rank_bytes(layout, 8, 8192)
        assert each["longest_context_tokens"] == int(sizes.longest_context(layout, room, 8))
        assert each["fits"]
        assert each["admitted_requests"] == (4 if name in ("DP", "DOP") else 1) * each["admitted_per_owner"]
    assert found["fastest"] == min(found["layouts"], key=lambda name: found["layouts"][name]["step_seconds"])
    moves = {(each["from"], each["to"]): each for each in found["switches"]}
    assert set(moves) == {(a.name, b.name) for a, b in SWITCHES}
    live = 8 * 8192 * shape.layer_token_bytes
    assert moves["TP", "DP"]["received_weight_bytes_per_rank_and_layer"] == 0.75 * shape.layer_projection_bytes
    assert moves["DOP", "TP"]["received_kv_bytes_per_rank_and_layer"] == 0.75 * live
    assert moves["DP", "CP"]["total_bytes"] == shape.layers * 0.75 * live
    assert moves["DP", "DOP"]["total_bytes"] == moves["DP", "DOP"]["blocking_seconds"] == 0
    seconds = {name: each["step_seconds"] for name, each in found["layouts"].items()}
    for (source, destination), each in moves.items():
        gained = seconds[source] - seconds[destination]
        expected = pytest.approx(each["exposed_seconds"] / gained) if gained > 0 else None
        assert each["repaid_after_steps"] == expected
        assert each["blocking_seconds"] == pytest.approx(shape.layers * each["layer_transfer_seconds"])
        assert each["exposed_seconds"] <= each["blocking_seconds"]


def test_text_names_every_layout_and_switch(capsys):
    text = plan(capsys, "--model", "QWEN3-30B-A3B", "--ranks", "4", "--chunk", "8192", "--rates")
    for source, destination in SWITCHES:
        assert f"{source} -> {destination}" in text
    assert "one prefills 8,192 more" in text
    assert "fastest" in text
    assert "projection_flops" in text
    assert "not measured" in text
    assert max(map(len, text.splitlines())) <= 120


def test_chunks_are_prefilled_by_one_request(capsys):
    arguments = "--model deepseek-v2-lite --ranks 4 --batch 3 --context 1000 --chunk 128 --json"
    found = json.loads(plan(capsys, *arguments.split()))
    batch = Batch(np.arange(3), np.array([1001, 1001, 1128]), np.array([1, 1, 128]))
    constants = Constants(**found["calibration"]["constants"])
    for name, layout in LAYOUTS.items():
        expected = step_stages(SHAPES["deepseek-v2-lite"], layout, 4, batch, constants)
        assert found["layouts"][name]["step_seconds"] == pytest.approx(expected.seconds)


def test_layouts_without_room_say_so(capsys):
    arguments = "--model deepseek-v2-lite --ranks 2 --gpu-memory 30 --memory-fraction 1"
    text = plan(capsys, *arguments.split())
    assert "TP does not fit: rank 0 would hold 15.50 GiB of projections and KV + 2.00 reserve, and has" in text
    assert "no room" in text
    found = json.loads(plan(capsys, *arguments.split(), "--json"))
    assert [name for name, each in found["layouts"].items() if each["fits"]] == ["DP", "CP", "DOP"]
    obstacles = {(each["from"], each["to"]): each["obstacle"] for each in found["switches"]}
    assert obstacles["DP", "TP"] == "TP does not hold this batch"
    assert obstacles["DP", "CP"] == ""


def test_changes_to_the_model(capsys):
    arguments = ["--model", "deepseek-v3", "--num-layers", "8", "--ranks", "2", "--json"]
    bf16 = json.loads(plan(capsys, *arguments))
    mixed = json.loads(plan(capsys, *arguments, "--precision", "fp8", "--kv-precision", "bf16"))
    assert bf16["layers"] == 8
    assert (
        bf16["layouts"]["DP"]["projection_bytes"] == 2 * mixed["layouts"]["DP"]["projection_bytes"] == 8 * 328 * 2**20
    )
    assert bf16["kv_bytes_per_token"] == mixed["kv_bytes_per_token"]


def test_measured_rates_replace_nominal_ones(capsys, tmp_path):
    path = tmp_path / "rates.json"
    save(Calibration("one", Constants(1e12, 1e12, 1e9, 1e9, 1e9, 1e-3), "measured"), path)
    arguments = ["--model", "deepseek-v2-lite", "--ranks", "2", "--calibration", str(path)]
    slow = json.loads(plan(capsys, *arguments, "--json"))
    assert slow["calibration"]["machine"] == "one"
    fast = json.loads(plan(capsys, *arguments[:4], "--json"))
    assert slow["layouts"]["TP"]["step_seconds"] > 100 * fast["layouts"]["TP"]["step_seconds"]
    save(Calibration("two", Constants(1e12, 1e12, 1e9, 1e9, 1e9, 1e-3), "measured"), path)
    assert "has 'one', 'two'; name one of them" in refused(capsys, *arguments)
    assert "not 'three'" in refused(capsys, *arguments, "--machine", "three")
    assert json.loads(plan(capsys, *arguments, "--machine", "two", "--json"))["calibration"]["machine"] == "two"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--ranks 2", "--model --recipe is required"),
        ("--model gpt2", "invalid choice: 'gpt2'"),
        ("--model deepseek-v3", "does not fit on 8 ranks: each would hold 155.3 GiB"),
        ("--model qwen3-30b-a3b --ranks 3", "32 query heads do not divide over 3 ranks; these do: 1, 2, 4, 8"),
        ("--model qwen3-30b-a3b --batch 0", "0 is not at least 1"),
        ("--model qwen3-30b-a3b --memory-fraction 1.5", "--memory-fraction is 1.5; it is at most 1"),
        ("--model qwen3-30b-a3b --num-layers 49", "Qwen3-30B-A3B has 48"),
        ("--model qwen3-30b-a3b --batch 100000 --context 100000", "this command enumerates at most"),
        ("--model qwen3-30b-a3b --calibration nowhere.json", "there is no such file"),
        ("--model qwen3-30b-a3b --machine here", "--machine goes with --calibration"),
        ("--recipe nowhere.yaml", "recipe nowhere.yaml: No such file or directory"),
    ],
)
def test_bad_input_is_one_clear_message(capsys, arguments, said):
    assert said in refused(capsys, *arguments.split())


def test_planning_needs_no_torch_and_the_command_no_numpy():
    code = (
        "import sys, megaring.cli; assert 'numpy' not in sys.modules, 'numpy';"
        "megaring.cli.main('rollout plan --model qwen3-30b-a3b --ranks 4'.split());"
        "import megaring.rollout.owners, megaring.rollout.replay;"
        "assert not {'torch', 'megatron'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)
