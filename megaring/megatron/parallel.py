"""Start and end the processes' groups: tensor, context (the rank domain), expert, pipeline and data parallelism."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from megaring.errors import UserError
from megaring.megatron import cpu
from megaring.megatron.config import ParallelConfig


def start(parallel: ParallelConfig, *, seed: int) -> torch.device:
    """Join the groups of a checked set-up and return this rank's device.

    Call it once per process, started by torchrun (which says rank, world size and local rank), before a model is
    built; a default process group that exists already is used as it is. Puts the CPU stand-ins in place where there
    is no GPU. Every collective gives up after ``distributed_timeout_minutes``. All communicators are made and used
    once here, so that a step neither waits for one nor runs out of memory over one.

    The default group is not bound to the device: NCCL would then make a communicator for each of Megatron's groups at
    once, some twenty, where training uses half of them. Nor are there gloo groups beside NCCL's: no step needs one.
    """
    timeout = timedelta(minutes=parallel.distributed_timeout_minutes)
    device = torch.device("cpu")
    if not cpu.install():
        here, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
        if here > gpus:
            raise UserError(f"{here} processes for {gpus} GPUs on this machine; start at most one for each")
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        dist.init_process_group("gloo" if device.type == "cpu" else "nccl", timeout=timeout)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
        context_parallel_size=parallel.context_parallel_size,
        expert_model_parallel_size=parallel.expert_model_parallel_size,
        expert_tensor_parallel_size=parallel.expert_tensor_parallel_size,
        distributed_timeout_minutes=parallel.distributed_timeout_minutes,
        create_gloo_process_groups=False,
    )
    _warm_up(device)
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)
    return device


def stop() -> None:
    """Leave the groups, the default one included."""
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def domain_group() -> dist.ProcessGroup:
    """The rank domain: the context-parallel ranks of this pipeline stage, tensor-parallel rank and replica."""
    return parallel_state.get_context_parallel_group()


def _warm_up(device: torch.device) -> None:
    """Use every group that training uses, in the same order on every rank: one small all-reduce in each, and one
    all-to-all where ranks also send to single peers, for which NCCL connects each pair apart.
    """
    context = parallel_state.get_context_parallel_group()
    pipeline = parallel_state.get_pipeline_model_parallel_group()
    experts = parallel_state.get_expert_model_parallel_group()
    reducing = (
        None,
        parallel_state.get_tensor_model_parallel_group(),
        context,
        pipeline,
        parallel_state.get_data_parallel_group(with_context_parallel=True),
        parallel_state.get_tensor_and_context_parallel_group(),
        parallel_state.get_model_parallel_group(),
        experts,
        parallel_state.get_expert_data_parallel_group(),
        parallel_state.get_expert_tensor_model_pipeline_parallel_group(),
    )
    for group in reducing:
        if dist.get_world_size(group) > 1:
            dist.all_reduce(torch.ones(1, device=device), group=group)
    for group in (context, pipeline, experts):
        if group.size() > 1:
            words = torch.ones(group.size(), device=device)
            dist.all_to_all_single(torch.empty_like(words), words, group=group)
    if device.type == "cuda":
        torch.cuda.synchronize()
