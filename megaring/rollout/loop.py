"""An engine that other threads can talk to: it runs in one thread, commands reach it between two steps."""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from threading import Event, Lock
from typing import Any

from megaring.rollout.engine import Engine, EngineFailed
from megaring.rollout.request import Delta, SamplingParams

Listener = Callable[[Delta | EngineFailed], None]
"""Told what is new of a request, in the engine's thread; must return at once. After EngineFailed nothing follows."""


class EngineLoop:
    """Runs ``engine`` until ``stop``. ``beat``: seconds between heartbeats while there is nothing to do."""

    def __init__(self, engine: Engine, beat: float = 5.0) -> None:
        self._engine, self._beat = engine, beat
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._listeners: dict[int, Listener] = {}
        self._stopping, self._closed, self._lock = Event(), False, Lock()
        self.failure: str | None = None

    def call[T](self, act: Callable[[Engine], T]) -> Future[T]:
        """Have the engine's thread do something between two steps; its result or error comes with the future.

        After the end of the loop the future fails with EngineFailed.
        """
        future: Future[T] = Future()

        def command() -> None:
            if future.set_running_or_notify_cancel():
                _settle(future, act, self._engine)

        with self._lock:
            if self._closed:
                future.set_exception(EngineFailed(self.failure or "the engine has been stopped"))
            else:
                self._commands.put(command)
        return future

    def submit(self, prompt: Sequence[int], params: SamplingParams, listener: Listener) -> Future[int]:
        """Add a request, whose number comes with the future, and have ``listener`` told of all that it gives."""

        def add(engine: Engine) -> int:
            number = engine.add(prompt, params)
            self._listeners[number] = listener
            return number

        return self.call(add)

    def abort(self, request: int) -> Future[Any]:
        """End a request; its listener is told. Does nothing for one that has ended."""
        return self.call(lambda engine: engine.abort(request))

    def stop(self) -> None:
        """End ``run`` after the step under way; live requests are aborted. From any thread, also a signal handler."""
        self._stopping.set()
        self._commands.put(None)

    def run(self) -> None:
        """Serve in this thread until ``stop``. Raises EngineFailed when the engine does, once all listeners know."""
        engine = self._engine
        try:
            while not self._stopping.is_set():
                self._do_commands(wait=not engine.has_work)
                if engine.has_work and not self._stopping.is_set():
                    self._tell(engine.step())
            for request in engine.live:
                engine.abort(request)
            engine.pause()  # so that the last step only reports and gives back
            self._tell(engine.step())
        except EngineFailed as error:
            self.failure = str(error)
            raise
        finally:
            self._close()

    def _do_commands(self, wait: bool) -> None:
        """Do what is queued; with ``wait``, until there is something to do or the heart has to beat."""
        while True:
            try:
                command = self._commands.get(wait, self._beat) if wait else self._commands.get_nowait()
            except queue.Empty:
                if wait:
                    self._engine.heartbeat()
                return
            wait = False
            if command is not None:
                command()

    def _tell(self, deltas: Sequence[Delta]) -> None:
        for delta in deltas:
            listener = self._listeners.get(delta.request)
            if listener is not None:
                listener(delta)
            if delta.completed is not None:
                self._listeners.pop(delta.request, None)

    def _close(self) -> None:
        """Leave nobody waiting."""
        with self._lock:
            self._closed = True
        error = EngineFailed(self.failure or "the engine has been stopped")
        for listener in self._listeners.values():
            listener(error)
        self._listeners.clear()
        while not self._commands.empty():
            if (command := self._commands.get()) is not None:
                command()


def _settle[T](future: Future[T], act: Callable[[Engine], T], engine: Engine) -> None:
    try:
        future.set_result(act(engine))
    except Exception as error:
        future.set_exception(error)
