"""Commands with a time limit leave nothing behind, also where their processes have sessions of their own."""

import sys
import time
from pathlib import Path

import psutil
import pytest

FAMILY = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", {child!r}], start_new_session=True)
print("child", child.pid, flush=True)
time.sleep(100)
"""
STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(100)"
)


@pytest.fixture
def bounded_run(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "scripts"))
    import bounded_run

    monkeypatch.setattr(bounded_run, "GRACE", 1.0)
    return bounded_run


def runs(pid):
    """Whether a process is there and not merely waiting for its parent to look."""
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def python(code):
    return [sys.executable, "-c", code]


def test_the_output_is_logged_and_the_exit_code_judged(bounded_run, tmp_path):
    log = tmp_path / "log"
    assert bounded_run.run_bounded(python("print('fine')"), log, 30) is None
    assert log.read_text() == "fine\n"
    why = bounded_run.run_bounded(python("for i in range(20): print(i)\nraise SystemExit(3)"), log, 30)
    assert why.splitlines() == [str(i) for i in range(8, 20)]


def test_past_the_limit_the_whole_family_is_gone(bounded_run, tmp_path):
    log, began = tmp_path / "log", time.monotonic()
    why = bounded_run.run_bounded(python(FAMILY.format(child=STUBBORN)), log, 3)
    assert time.monotonic() - began < 20
    assert why.startswith("no end within 3 s; its last words:\nchild ") and "deaf" in why
    child = int(next(line for line in why.splitlines() if line.startswith("child")).split()[1])
    assert not runs(child)


def test_an_interruption_ends_the_family_too(bounded_run, tmp_path, monkeypatch):
    def interrupted(process, timeout):
        while not (tmp_path / "log").read_text():
            time.sleep(0.05)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(psutil.Popen, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            bounded_run.run_bounded(python(FAMILY.format(child="import time; time.sleep(100)")), tmp_path / "log", 30)
    assert not runs(int((tmp_path / "log").read_text().split()[1]))
