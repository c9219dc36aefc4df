"""Work ahead in a thread: order, bounds, errors and the end of the thread."""

import gc
import itertools
import threading
import time

import pytest

from megaring.data.prefetch import Prefetcher


def wait_until(condition, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)


def prefetch_threads():
    return [thread for thread in threading.enumerate() if thread.name == "prefetch"]


def test_gives_all_items_in_order():
    with Prefetcher(range(100), 3) as ahead:
        assert list(ahead) == list(range(100))


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_works_ahead_and_no_further(depth):
    made = []

    def source():
        for number in itertools.count():
            made.append(number)
            yield number

    with Prefetcher(source(), depth) as ahead:
        wait_until(lambda: len(made) == depth)
        assert next(ahead) == 0
        wait_until(lambda: len(made) == depth + 1)
        time.sleep(0.05)
        assert len(made) == depth + 1


def test_error_comes_where_its_item_was_due():
    def source():
        yield 1
        raise ValueError("document 7 is broken")

    with Prefetcher(source(), 4) as ahead:
        assert next(ahead) == 1
        for _ in range(2):
            with pytest.raises(ValueError, match=r"^document 7 is broken$"):
                next(ahead)


def test_close_ends_the_thread_and_the_iteration():
    ahead = Prefetcher(itertools.count(), 2)
    next(ahead)
    ahead.close()
    ahead.close()
    assert not prefetch_threads()
    assert list(ahead) == []


def test_losing_the_last_reference_ends_the_thread():
    ahead = Prefetcher(itertools.count(), 2)
    next(ahead)
    del ahead
    gc.collect()
    wait_until(lambda: not prefetch_threads())


def test_waiting_has_a_bound():
    release = threading.Event()

    def source():
        release.wait(30)
        yield 1

    with Prefetcher(source(), 1, timeout=0.05) as ahead:
        with pytest.raises(TimeoutError, match=r"made no microbatch in 0\.05 s"):
            next(ahead)
        release.set()


def test_depth():
    with pytest.raises(ValueError, match="depth is 0"):
        Prefetcher([], 0)
