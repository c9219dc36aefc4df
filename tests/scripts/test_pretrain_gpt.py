"""The training script as its user starts it: errors before and during a run, and a run that is killed."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from megaring.data.indexed import IndexedWriter

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = str(ROOT / "scripts" / "pretrain_gpt.py")
SMALL = [
    *("--num-layers", "1", "--hidden-size", "32", "--num-experts", "2", "--moe-ffn-hidden-size", "32"),
    *("--token-budget", "512", "--seq-length", "256", "--lr-warmup-iters", "1", "--vocab-size", "257"),
]


def corpus(folder, lengths=(200, 30, 100, 256, 5, 64), largest_id=255):
    prefix = folder / "corpus"
    with IndexedWriter(prefix, 257) as writer:
        for length in lengths:
            writer.add(np.arange(length) % (largest_id + 1))
        writer.commit()
    return str(prefix)


def one_rank(*argv, world_size=4):
    """The script as rank 0 of ``world_size`` under torchrun; it must end before it would meet its peers."""
    env = {**os.environ, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(world_size)}
    command = [sys.executable, SCRIPT, *argv]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)


def torchrun(processes, *argv):
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", *argv]


def tell_all(process, number):
    """Send a signal to torchrun, its ranks and their writers."""
    for each in [*process.children(recursive=True), process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.send_signal(number)


def damage(prefix, how):
    idx, ids = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    if how == "cut index":
        idx.write_bytes(idx.read_bytes()[:-9])
    elif how == "foreign index":
        idx.write_bytes(b"NOTANIDX" + idx.read_bytes()[8:])
    elif how == "cut tokens":
        ids.write_bytes(ids.read_bytes()[:-2])
    elif how == "no index":
        idx.unlink()


@pytest.mark.parametrize(
    ("how", "parts"),
    [
        ("cut index", ["corpus.idx is corrupt"]),
        ("foreign index", ["corpus.idx is corrupt"]),
        ("cut tokens", ["corpus.bin has", "says"]),
        ("no index", ["corpus.idx does not exist"]),
    ],
)
def test_a_damaged_corpus_ends_the_run_with_one_line(tmp_path, how, parts):
    prefix = corpus(tmp_path)
    damage(prefix, how)
    done = one_rank(*SMALL, "--data-path", prefix)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1 and done.stderr.startswith("pretrain_gpt.py: error: ")
    for part in parts:
        assert part in done.stderr


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        (["--num-layer", "3"], "did you mean --num-layers?"),
        (["--context-parallel-size", "3"], "4 ranks cannot be divided"),
        (["--attention-dropout", "0.1"], "--attention-dropout is not supported"),
        (["--window-size", "64"], "--window-size is not supported"),
        (["--seq-length", "128"], "--overlong split"),
        (["--attention-backend", "fused"], "--attention-backend fused"),
        (["--recompute-method", "block"], "--recompute-method has no effect without --recompute-granularity"),
    ],
)
def test_a_bad_option_ends_the_run_with_one_line(tmp_path, argv, part):
    done = one_rank(*SMALL, "--data-path", corpus(tmp_path), *argv)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1 and part in done.stderr


def test_without_torchrun_it_says_how_to_start():
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    done = subprocess.run([sys.executable, SCRIPT, "--lr", "1"], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "start it with torchrun: torchrun" in done.stderr


@pytest.mark.launch
def test_under_torchrun_all_ranks_end_and_the_message_is_last(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("num-layrs: 2\n")
    began = time.monotonic()
    command = torchrun(3, SCRIPT, "--recipe", str(recipe))
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert time.monotonic() - began < 60
    assert done.returncode != 0
    last = [line for line in done.stderr.splitlines() if line.strip("= ")][-1]
    assert "unknown key 'num-layrs' (did you mean --num-layers?)" in last


@pytest.mark.launch
def test_a_token_id_drawn_beyond_the_vocabulary_ends_all_ranks(tmp_path):
    lengths = [200, 256, 250, 240]
    prefix = corpus(tmp_path, lengths, largest_id=255)
    argv = [*SMALL, "--vocab-size", "250", "--data-path", prefix, "--output-dir", str(tmp_path / "out")]
    done = subprocess.run(torchrun(2, SCRIPT, *argv), capture_output=True, text=True, timeout=240)
    assert done.returncode != 0
    last = [line for line in done.stderr.splitlines() if line.strip("= ")][-1]
    assert "holds token id 25" in last and "vocabulary has 250" in last
    assert "step 1/" not in done.stdout


@pytest.mark.launch
def test_killed_in_the_middle_of_a_checkpoint_it_resumes_from_the_last_whole_one(tmp_path):
    out = tmp_path / "out"
    argv = [*SMALL, "--data-path", corpus(tmp_path), "--output-dir", str(out), "--save-interval", "1"]
    command = torchrun(1, SCRIPT, *argv)
    running = psutil.Popen([*command, "--train-iters", "1000"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    checkpoints = out / "checkpoints"
    try:
        deadline = time.monotonic() + 200
        while True:
            assert running.poll() is None, running.stderr.read().decode()
            assert time.monotonic() < deadline, "no second checkpoint was begun in time"
            if list(checkpoints.glob("iter_*")) and list(checkpoints.glob(".partial_*")):
                # Stopped, it cannot be renamed between the look and the kill.
                tell_all(running, signal.SIGSTOP)
                if list(checkpoints.glob(".partial_*")):
                    break
                tell_all(running, signal.SIGCONT)
    finally:
        tell_all(running, signal.SIGKILL)
        running.wait()
    last_whole = max(int(path.name.removeprefix("iter_")) for path in checkpoints.glob("iter_*"))
    again = [*command, "--train-iters", str(last_whole + 1), "--lr-decay-iters", "1000"]
    done = subprocess.run(again, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    assert f"resumed after step {last_whole} from" in done.stdout
    assert f"step {last_whole + 1}/{last_whole + 1} | loss" in done.stdout
    assert "torch.distributed is disabled" not in done.stderr
    assert not list(checkpoints.glob(".partial_*"))


@pytest.mark.launch
def test_ctrl_c_ends_all_ranks_with_one_line_of_ours(tmp_path):
    argv = [*SMALL, "--data-path", corpus(tmp_path), "--output-dir", str(tmp_path / "out"), "--train-iters", "100000"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    running = psutil.Popen([*torchrun(2, SCRIPT), *argv], text=True, start_new_session=True, **pipes)
    try:
        assert any(line.startswith("step ") for line in running.stdout), running.stderr.read()
        os.killpg(running.pid, signal.SIGINT)  # as a terminal does
        _, errors = running.communicate(timeout=60)
    finally:
        if running.poll() is None:
            tell_all(running, signal.SIGKILL)
            running.wait()
    assert running.returncode != 0
    assert errors.count("pretrain_gpt.py: interrupted; with the same --output-dir it resumes") == 1
    assert "[rank0]" not in errors and "[rank1]" not in errors
