"""Ranks that end together: statuses, signals, a rank that dies, one that hangs; and the two commands from the shell."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from megaring.rollout import launch as launching
from megaring.rollout.launch import launch

ROOT = Path(__file__).parents[3]
RECIPE = ROOT / "recipes" / "tiny_cpu.yaml"


def run(code, ranks=2):
    return launch([sys.executable, "-c", f"import os, sys, time\nrank = int(os.environ['RANK'])\n{code}"], ranks)


def test_ranks_know_each_other(tmp_path):
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    code = f"open(f'{tmp_path}/{{rank}}', 'w').write(','.join(os.environ[name] for name in {names}))"
    assert run(code) == 0
    first, second = ((tmp_path / str(rank)).read_text().split(",") for rank in range(2))
    assert first[:4] == ["0", "0", "2", "2"] and second[:4] == ["1", "1", "2", "2"]
    assert first[4:] == second[4:]


def test_a_rank_that_fails_ends_all(monkeypatch):
    monkeypatch.setattr(launching, "_AFTER_FAILURE", 0.2)
    began = time.monotonic()
    assert run("sys.exit(3) if rank else time.sleep(60)") == 3
    assert run("os.kill(os.getpid(), 9) if rank else time.sleep(60)") == 128 + 9
    assert time.monotonic() - began < 30


def test_a_rank_that_hangs_after_the_others_is_killed(monkeypatch, capfd):
    monkeypatch.setattr(launching, "_AFTER_SUCCESS", 0.2)
    assert run("time.sleep(60 * rank)") == 1
    assert "ranks [1] have not ended" in capfd.readouterr().err


def command(*arguments):
    return [sys.executable, "-m", "megaring.cli", "rollout", *arguments, "--recipe", str(RECIPE)]


@pytest.mark.launch
def test_generate_drains_a_batch_through_switches(tmp_path):
    pytest.importorskip("matplotlib")
    files = ["--timeline", str(tmp_path / "run.png"), "--output", str(tmp_path / "out.jsonl")]
    sizes = ["--ranks", "2", "--random-prompts", "6", "--max-tokens", "24", "--prompt-tokens", "40"]
    done = subprocess.run(
        command("generate", *sizes, "--layout", "turn", "--turn-every", "2", *files),
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    for switch in ("TP -> DP", "DP -> CP", "CP -> DOP"):
        assert f": {switch}, " in done.stdout
    assert re.search(r"^6 requests, \d+ new tokens in \d+ steps", done.stdout, re.MULTILINE)
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 6
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.launch
def test_serve_answers_and_ends_on_a_signal(tmp_path):
    log = tmp_path / "log"
    with log.open("w") as file:
        server = subprocess.Popen(
            command("serve", "--port", "0", "--layout", "DOP"),
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    try:
        deadline = time.monotonic() + 240
        while not (found := re.search(r"on (http://\S+)", log.read_text())):
            assert server.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        body = json.dumps({"prompt": "Once", "max_tokens": 4, "seed": 1}).encode()
        with urllib.request.urlopen(found[1], body, timeout=60) as answer:
            made = json.load(answer)["choices"][0]
        assert (len(made["token_ids"]), made["finish_reason"]) == (4, "length")
        server.send_signal(signal.SIGTERM)
        assert server.wait(30) == 0
        assert "served 4 tokens in 4 steps" in log.read_text()
    finally:
        server.kill()
        server.wait()
