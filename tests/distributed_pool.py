"""A pool of processes that carries many small distributed test cases, so that few of them pay for a start.

``pool.run(4, fn, *args)`` calls ``fn(rank, 4, *args)`` on four processes that already share a fresh default process
group, and returns the four results. The processes live on for the next case. A case that fails or runs out of time
ends all of its processes, so no rank is left waiting for a peer; the next case starts new ones. They are forked from
one process that has the heavy modules imported, so starting them again costs milliseconds.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing import connection, forkserver
from pathlib import Path
from typing import Any

REPORT_GRACE = 0.5  # seconds that peers get to report after the first failure
# How Gloo reports that ranks of a new group did not reach each other.
UNCONNECTED = "Gloo connectFullMesh failed"
MOST_THREADS = 200  # of a worker; process groups of past cases keep theirs, and thousands of them slow every case down
WORKER_MARGIN = 10.0  # seconds past the limit after which a worker whose pool has vanished ends itself
# torch.autograd imports the last one when backward first gets explicit gradients: seconds for every worker.
PRELOAD = ("torch", "torch.distributed", "torch.fx.experimental.symbolic_shapes")
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS"), "1")


class CaseFailed(AssertionError):
    """A case failed on some rank; the message holds the traceback of each rank that reported one, first one first."""


class Pool:
    """Worker processes for distributed cases; see the module's docstring. Use it as a context manager.

    preload: modules beyond ``PRELOAD`` that the forking parent imports once; what a worker needs further it imports
    itself. Preloading must start no threads and must not touch a GPU.
    """

    def __init__(self, preload: Sequence[str] = ()) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([*PRELOAD, *preload])
        self._folder = tempfile.TemporaryDirectory(prefix="distributed_pool_")
        self._workers: list[_Worker] = []
        self._cases = 0

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(
        self,
        world_size: int,
        fn: Callable[..., Any],
        *args: Any,
        timeout: float = 60.0,
        backend: str = "gloo",
        **kwargs: Any,
    ) -> list[Any]:
        """Call ``fn(rank, world_size, *args, **kwargs)`` on every rank and return the results in rank order.

        fn: a function at module level. Its default process group exists when it is called, with ``timeout`` as its own
        limit, and is destroyed after it; it may be destroyed earlier. Arguments and results are pickled.
        timeout: seconds for the whole case, after which all its processes are killed.
        Raises CaseFailed when a rank raises, dies or is late. When Gloo could not connect the case's own group, which
        happens once in thousands of groups and before ``fn`` is called, it is tried again with fresh processes.
        """
        payload = pickle.dumps((fn, args, kwargs))
        try:
            return self._run(world_size, payload, timeout, backend)
        except CaseFailed as failure:
            if UNCONNECTED not in str(failure):
                raise
        return self._run(world_size, payload, timeout, backend)

    def _run(self, world_size: int, payload: bytes, timeout: float, backend: str) -> list[Any]:
        self._grow(world_size)
        self._cases += 1
        store = str(Path(self._folder.name) / f"store_{self._cases}")
        group = self._workers[:world_size]
        for rank, worker in enumerate(group):
            worker.pipe.send((list(sys.path), rank, world_size, store, backend, timeout, payload))
        try:
            return self._collect(group, timeout)
        except BaseException:  # an interrupt from the keyboard too: the group is in an unknown state
            self._kill()
            raise
        finally:
            Path(store).unlink(missing_ok=True)
            if any(_num_threads(worker.process.pid) > MOST_THREADS for worker in self._workers):
                self._kill()  # the next case forks fresh ones

    def close(self) -> None:
        """End the processes."""
        self._kill()
        self._folder.cleanup()

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers that live now, by rank."""
        return [worker.process.pid for worker in self._workers]

    def _grow(self, world_size: int) -> None:
        if any(not worker.process.is_alive() for worker in self._workers):  # died between two cases
            self._kill()
        with _environment(ONE_THREAD):  # torch reads these when it is imported, in the forking parent
            forkserver.ensure_running()
        while len(self._workers) < world_size:
            stacks = Path(self._folder.name) / f"stacks_{self._cases}_{len(self._workers)}"
            self._workers.append(_Worker(self._context, stacks))

    def _collect(self, group: list[_Worker], timeout: float) -> list[Any]:
        deadline = time.monotonic() + timeout
        results: dict[int, Any] = {}
        failures: list[str] = []
        while len(results) + len(failures) < len(group):
            waiting = {w.pipe: r for r, w in enumerate(group) if r not in results and not w.failed}
            ready = connection.wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                if not failures:
                    failures = [_late(rank, group[rank], timeout) for rank in waiting.values()]
                break
            for pipe in ready:
                rank = waiting[pipe]
                try:
                    good, value = pickle.loads(pipe.recv_bytes())
                except (EOFError, ConnectionResetError):
                    group[rank].process.join(1.0)
                    good, value = False, f"process died with exit code {group[rank].process.exitcode}"
                if good:
                    results[rank] = value
                    continue
                group[rank].failed = True
                failures.append(f"rank {rank}: {value}")
                deadline = min(deadline, time.monotonic() + REPORT_GRACE)
        if failures:
            raise CaseFailed("\n".join([f"{len(failures)} of {len(group)} ranks failed", *failures]))
        return [results[rank] for rank in range(len(group))]

    def _kill(self) -> None:
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.join()
            worker.pipe.close()
        self._workers = []


class _Worker:
    """One process, the pipe to it, and the file in which it writes its stack when asked."""

    def __init__(self, context: Any, stacks: Path) -> None:
        self.pipe, theirs = context.Pipe()
        self.stacks = stacks
        self.failed = False
        self.process = context.Process(target=_serve, args=(theirs, str(stacks)), daemon=True)
        self.process.start()
        theirs.close()


def _late(rank: int, worker: _Worker, timeout: float) -> str:
    """What a rank that ran out of time was doing."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(worker.process.pid, signal.SIGUSR1)
    time.sleep(0.1)
    where = worker.stacks.read_text() if worker.stacks.exists() else "(it had not begun)"
    return f"rank {rank}: no result within {timeout:g} s; it was at\n{where}"


def _num_threads(pid: int) -> int:
    try:
        return len(os.listdir(f"/proc/{pid}/task"))
    except OSError:  # it has ended, or this is not Linux
        return 0


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Any:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _serve(pipe: connection.Connection, stacks: str) -> None:
    """A worker's life: one case after another until the pool closes its end of the pipe."""
    import torch

    torch.set_num_threads(1)
    stack_file = open(stacks, "w")  # noqa: SIM115  kept open for the signal handler
    faulthandler.register(signal.SIGUSR1, file=stack_file, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the pool ends its workers; a second traceback would only confuse
    while True:
        try:
            path, rank, world_size, store, backend, timeout, payload = pipe.recv()
        except EOFError:
            return
        sys.path[:] = path
        faulthandler.dump_traceback_later(timeout + WORKER_MARGIN, exit=True)
        try:
            message = pickle.dumps((True, _one_case(rank, world_size, store, backend, timeout, payload)))
        except BaseException:
            message = pickle.dumps((False, traceback.format_exc()))
        faulthandler.cancel_dump_traceback_later()
        # Report before leaving the group: peers notice the closed connection, and theirs would come first.
        pipe.send_bytes(message)


def _one_case(rank: int, world_size: int, store: str, backend: str, timeout: float, payload: bytes) -> Any:
    import torch.distributed as dist

    limit = timedelta(seconds=timeout)
    file_store = dist.FileStore(store, world_size)
    dist.init_process_group(backend, store=file_store, rank=rank, world_size=world_size, timeout=limit)
    fn, args, kwargs = pickle.loads(payload)
    result = fn(rank, world_size, *args, **kwargs)
    if dist.is_initialized():
        dist.destroy_process_group()
    return result
