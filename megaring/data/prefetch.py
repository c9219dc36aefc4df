"""Work ahead in a thread: the next microbatches are planned and read while this one trains."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator


class Prefetcher[T]:
    """Iterates ``source`` in a thread of its own, at most ``depth`` items ahead.

    An error of the source is raised, as it is, by the ``next`` that would have given the missing item. ``close`` (or
    leaving the context, or losing the last reference) ends the thread after the item it is making; ``next`` then raises
    StopIteration. A ``next`` that waits longer than ``timeout`` seconds raises TimeoutError.
    """

    def __init__(self, source: Iterable[T], depth: int, *, timeout: float = 300.0):
        if depth < 1:
            raise ValueError(f"depth is {depth}; at least one item must be made ahead")
        self._shared = _Shared(depth)
        self._timeout = timeout
        # The thread knows the shared part only: it does not keep a forgotten prefetcher alive.
        self._thread = threading.Thread(target=self._shared.produce, args=(source,), name="prefetch", daemon=True)
        self._finalizer = weakref.finalize(self, self._shared.close)
        self._thread.start()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        return self._shared.take(self._timeout)

    def close(self) -> None:
        """End the thread and wait for it, at most ``timeout`` seconds."""
        self._finalizer()
        self._thread.join(self._timeout)

    def __enter__(self) -> Prefetcher[T]:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class _Shared[T]:
    """The queue between the two threads."""

    def __init__(self, depth: int):
        self._depth = depth
        self._items: deque[T] = deque()
        self._changed = threading.Condition()
        self._finished = self._closed = False
        self._error: BaseException | None = None

    def produce(self, source: Iterable[T]) -> None:
        error = None
        try:
            for item in source:
                with self._changed:
                    self._items.append(item)
                    self._changed.notify_all()
                    # Not bounded: how long a step trains is the consumer's affair, and close() ends the wait.
                    self._changed.wait_for(lambda: self._closed or len(self._items) < self._depth)
                    if self._closed:
                        return
        except BaseException as caught:
            error = caught
        with self._changed:
            self._finished, self._error = True, error
            self._changed.notify_all()

    def take(self, timeout: float) -> T:
        with self._changed:
            ready = self._changed.wait_for(lambda: self._items or self._finished or self._closed, timeout)
            if self._closed:
                raise StopIteration
            if not ready:
                raise TimeoutError(
                    f"the data loader made no microbatch in {timeout:g} s; is the corpus's disk reachable?"
                )
            if self._items:
                self._changed.notify_all()
                return self._items.popleft()
            if self._error is not None:
                raise self._error
            raise StopIteration

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._items.clear()
            self._changed.notify_all()
