"""Joining the groups: what is made and used before the first step, and in which order on a GPU."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megaring.errors import UserError
from megaring.megatron import parallel
from megaring.megatron.config import ParallelConfig


def start_and_watch(rank: int, world_size: int) -> dict:
    """The ranks that each collective of ``start`` joins, and whether Megatron made gloo groups beside its own."""
    seen = {"all_reduce": [], "all_to_all_single": []}

    def watched(name):
        original = getattr(dist, name)

        def call(*args, group=None, **kwargs):
            seen[name].append(dist.get_process_group_ranks(group))
            return original(*args, group=group, **kwargs)

        return original, call

    originals = {}
    for name in seen:
        originals[name], replacement = watched(name)
        setattr(dist, name, replacement)
    try:
        layout = ParallelConfig(context_parallel_size=2, pipeline_model_parallel_size=2, expert_model_parallel_size=2)
        parallel.start(layout, seed=0)
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)
    made = (parallel_state._DATA_PARALLEL_GROUP_GLOO, parallel_state._DATA_PARALLEL_GROUP_WITH_CP_GLOO)
    parallel_state.destroy_model_parallel()
    return {**seen, "gloo": [group is not None for group in made]}


def test_groups_are_used_and_peers_connected_before_the_first_step(pool):
    for rank, seen in enumerate(pool.run(4, start_and_watch, timeout=120)):
        domain, stages = [rank // 2 * 2, rank // 2 * 2 + 1], [rank % 2, rank % 2 + 2]
        assert seen["all_to_all_single"] == [domain, stages, domain]  # context, pipeline, experts
        assert seen["all_reduce"][0] == [0, 1, 2, 3]
        assert domain in seen["all_reduce"] and stages in seen["all_reduce"]
        assert seen["gloo"] == [False, False]


@pytest.fixture
def two_gpus(monkeypatch):
    """A machine that says it has two GPUs; ``calls`` is what ``start`` does on it, in order."""
    calls = []

    def note(name, *keep):
        return lambda *args, **kwargs: calls.append((name, *args, *(kwargs[k] for k in keep)))

    monkeypatch.setattr(parallel.cpu, "install", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", note("set_device"))
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    monkeypatch.setattr(dist, "init_process_group", note("join", "timeout"))
    monkeypatch.setattr(parallel_state, "initialize_model_parallel", note("groups", "distributed_timeout_minutes"))
    monkeypatch.setattr(parallel, "_warm_up", note("warm_up"))
    monkeypatch.setattr(parallel, "model_parallel_cuda_manual_seed", note("seed"))
    monkeypatch.setenv("LOCAL_RANK", "1")
    return calls


def test_on_gpus_the_device_is_set_before_the_groups_are_joined(two_gpus, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    device = torch.device("cuda", 1)
    assert parallel.start(ParallelConfig(distributed_timeout_minutes=3), seed=7) == device
    assert two_gpus == [
        ("set_device", device),
        ("join", "nccl", timedelta(minutes=3)),
        ("groups", 3),
        ("warm_up", device),
        ("seed", 7),
    ]


def test_more_processes_than_gpus_are_refused(two_gpus, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    with pytest.raises(UserError, match="3 processes for 2 GPUs on this machine"):
        parallel.start(ParallelConfig(), seed=7)
    assert two_gpus == []
