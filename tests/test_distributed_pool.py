"""The pool itself: results, fresh groups, errors, deaths and time limits."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from distributed_pool import CaseFailed


def total(rank, world_size, value, *, scale=1):
    tensor = torch.tensor([float(rank + value) * scale])
    dist.all_reduce(tensor)
    return rank, world_size, tensor


def worker_id(rank, world_size):
    assert dist.get_rank() == rank and dist.get_world_size() == world_size
    return os.getpid(), torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]


def leaves_early(rank, world_size):
    dist.destroy_process_group()
    return rank


def fails_on_last(rank, world_size):
    if rank == world_size - 1:
        raise RuntimeError(f"planned failure on {rank}")
    dist.barrier()


def kills_itself(rank, world_size):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def waits_for_ever(rank, world_size):
    if rank == 0:
        dist.barrier()
    else:
        time.sleep(1000)


def unpicklable(rank, world_size):
    return lambda: rank


def test_results_come_in_rank_order_and_workers_persist(pool):
    for world_size, expected in ((3, 2.0 * (5 + 6 + 7)), (2, 2.0 * (5 + 6)), (1, 10.0)):
        results = pool.run(world_size, total, 5, scale=2)
        assert [(rank, size, value.item()) for rank, size, value in results] == [
            (rank, world_size, expected) for rank in range(world_size)
        ]
    first = pool.run(3, worker_id)
    assert pool.run(2, worker_id) == first[:2]
    assert len({pid for pid, _, _ in first}) == 3 and os.getpid() not in {pid for pid, _, _ in first}
    assert all((threads, omp) == (1, "1") for _, threads, omp in first)


def unconnected_once(rank, world_size, marker):
    if rank == 0 and not marker.exists():
        marker.touch()
        raise RuntimeError("Gloo connectFullMesh failed with [...] Connection closed by peer")
    return os.getpid()


def test_a_group_that_did_not_connect_is_made_again(pool, tmp_path):
    before = pool.run(2, worker_id)
    after = pool.run(2, unconnected_once, tmp_path / "marker")
    assert (tmp_path / "marker").exists() and set(after).isdisjoint(pid for pid, _, _ in before)


def test_a_case_may_destroy_its_group(pool):
    assert pool.run(2, leaves_early) == [0, 1]
    assert pool.run(2, leaves_early) == [0, 1]


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (fails_on_last, r"rank 2: Traceback(.|\n)*planned failure on 2"),
        (kills_itself, "rank 1: process died with exit code -9"),
        (unpicklable, r"rank 0: Traceback(.|\n)*pickle"),
    ],
)
def test_a_failure_is_reported_and_ends_the_case_at_once(pool, fn, message):
    before = pool.run(3, worker_id)
    began = time.monotonic()
    with pytest.raises(CaseFailed, match=message):
        pool.run(3, fn, timeout=60)
    assert time.monotonic() - began < 20
    after = pool.run(3, worker_id)
    assert not {pid for pid, _, _ in before} & {pid for pid, _, _ in after}
    for pid, _, _ in before:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_late_case_is_killed_and_shows_where_it_was(pool):
    began = time.monotonic()
    with pytest.raises(CaseFailed, match=r"no result within 3 s(.|\n)*waits_for_ever"):
        pool.run(2, waits_for_ever, timeout=3)
    assert time.monotonic() - began < 20
    assert [value.item() for _, _, value in pool.run(2, total, 0)] == [1.0, 1.0]


def test_a_worker_that_died_between_cases_is_replaced(pool):
    pool.run(2, worker_id)
    os.kill(pool.pids[0], signal.SIGKILL)
    time.sleep(0.2)
    assert [value.item() for _, _, value in pool.run(2, total, 0)] == [1.0, 1.0]
