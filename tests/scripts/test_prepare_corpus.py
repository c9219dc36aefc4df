"""scripts/prepare_corpus.py as a user runs it."""

import os
import pty
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from megaring.data.indexed import IndexedCorpus

SCRIPT = Path(__file__).parents[2] / "scripts" / "prepare_corpus.py"


def run(*arguments):
    return subprocess.run(
        [sys.executable, str(SCRIPT), *map(str, arguments)], timeout=60, capture_output=True, text=True
    )


def test_folder(tmp_path):
    for name in ("a.py", "b.py", "b.md", "skip/c.py"):
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_text(name * 10)
    prefix = tmp_path / "out" / "corpus"
    done = run(
        "--input",
        tmp_path / "in",
        "--extensions",
        ".py",
        "--exclude",
        "skip",
        "--output-prefix",
        prefix,
        "--append-eod",
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[0] == f"{prefix}.bin, .idx, .json"
    assert "documents      2 (0 empty ones dropped)" in done.stdout
    assert "tokens         82" in done.stdout
    assert "50% 41" in done.stdout
    assert "byte, 257 ids, largest used 256" in done.stdout
    assert IndexedCorpus(prefix).lengths.tolist() == [41, 41]


def test_progress_bar_on_a_terminal(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 100))
    command = [sys.executable, str(SCRIPT), "--input", str(tmp_path), "--output-prefix", str(tmp_path / "out" / "c")]
    done = subprocess.run(command, timeout=60, stdout=subprocess.PIPE, stderr=theirs, text=True)
    os.close(theirs)
    shown = os.read(ours, 65_536).decode()
    os.close(ours)
    assert done.returncode == 0
    assert "1/1 [" in shown
    assert " documents/s]" in shown
    assert "documents      1 " in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--input", "nowhere"], "--input nowhere does not exist"),
        (["--input", os.devnull], f"--input {os.devnull} is neither a file nor a folder"),
        (["--input", SCRIPT, "--tokenizer", "nowhere.json"], "--tokenizer nowhere.json does not exist"),
        (["--input", SCRIPT, "--extension", ".py"], "unknown option --extension (did you mean --extensions?)"),
        (["--input", SCRIPT, "--valid-fraction", "2"], "--valid-fraction is 2.0; it must be"),
    ],
)
def test_errors_are_one_line_and_a_code(tmp_path, arguments, message):
    done = run(*arguments, "--output-prefix", tmp_path / "corpus")
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith(f"prepare_corpus.py: error: {message}")
    assert list(tmp_path.iterdir()) == []
