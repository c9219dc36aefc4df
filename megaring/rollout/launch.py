"""Run one command in T processes on this machine, as ranks of one group, and end them together. No torch.

It sets what torchrun sets, so a command works under either; unlike torchrun it hands signals to rank 0 alone, which
can then end the group in order.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

_POLL = 0.05  # seconds
_AFTER_FAILURE, _AFTER_SUCCESS = 5.0, 60.0  # seconds that the others have once the first rank has ended
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_PR_SET_PDEATHSIG = 1  # <sys/prctl.h>


def launch(command: Sequence[str], ranks: int) -> int:
    """Run ``command`` in ``ranks`` processes; returns 0, or the status of the first one that failed."""
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks))),
    }
    sys.stdout.flush()
    processes: list[subprocess.Popen] = []
    handlers = {each: signal.signal(each, lambda number, _: _forward(processes, number)) for each in _SIGNALS}
    try:
        for rank in range(ranks):
            environment = os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            processes.append(
                subprocess.Popen(
                    command,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,  # Ctrl-C in a terminal reaches the launcher alone
                    preexec_fn=_end_with_parent,
                )
            )
        return _wait(processes)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
        for each, handler in handlers.items():
            signal.signal(each, handler)


def _end_with_parent() -> None:
    """Have the kernel kill this process if the launcher dies (Linux), so that nothing is left."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _forward(processes: Sequence[subprocess.Popen], number: int) -> None:
    if processes and processes[0].poll() is None:
        processes[0].send_signal(number)


def _wait(processes: Sequence[subprocess.Popen]) -> int:
    """Wait for all; the first that ends gives the others a while."""
    status, deadline = 0, float("inf")
    while True:
        codes = [process.poll() for process in processes]
        failed = [code for code in codes if code]
        if failed and not status:
            status = failed[0] if failed[0] > 0 else 128 - failed[0]
        if None not in codes:
            return status
        if any(code is not None for code in codes):
            grace = _AFTER_FAILURE if failed else _AFTER_SUCCESS
            deadline = min(deadline, time.monotonic() + grace)
        if time.monotonic() > deadline:
            late = [rank for rank, code in enumerate(codes) if code is None]
            if not failed:
                print(f"megaring: ranks {late} have not ended with the others and are killed", file=sys.stderr)
            return status or 1
        time.sleep(_POLL)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
