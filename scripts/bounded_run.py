"""Run a command to its end within a time limit, and leave none of its processes behind."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

GRACE = 45.0  # seconds; torchrun gives its ranks 30 to leave when it is told to


def run_bounded(command: Sequence[str], log: Path, timeout: float) -> str | None:
    """Run ``command`` with its output in ``log``; None when it ended well, else why not.

    After ``timeout`` seconds, or when this process is interrupted meanwhile, the command is told to end, and what is
    left of it and its descendants after ``GRACE`` seconds is killed: a rank that lives on would hold its GPU.
    """
    with log.open("w") as output:
        process = psutil.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            code = process.wait(timeout)
        except psutil.TimeoutExpired:
            _end(process)
            return f"no end within {timeout:g} s; its last words:\n{_last_words(log)}"
        except BaseException:
            _end(process)
            raise
    return _last_words(log) if code else None


def _end(process: psutil.Popen) -> None:
    # torchrun's ranks have sessions of their own: a signal to its process group would not reach them.
    family = [*process.children(recursive=True), process]
    process.terminate()
    for each in _alive(family, GRACE):
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()  # psutil checks that the number still belongs to that process
    _alive(family, GRACE)


def _alive(family: list[psutil.Process], seconds: float) -> list[psutil.Process]:
    """Those that still run after at most ``seconds``; not zombies, which only wait for a parent that may be gone."""
    deadline = time.monotonic() + seconds
    while True:
        left = [each for each in family if each.is_running() and _state(each) != psutil.STATUS_ZOMBIE]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.1)


def _state(process: psutil.Process) -> str:
    try:
        return process.status()
    except psutil.NoSuchProcess:
        return psutil.STATUS_ZOMBIE


def _last_words(log: Path, lines: int = 12) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
