"""Start a generation worker on this process, which torchrun has started along with its peers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta

import torch
from megatron.core import parallel_state

from megaring.errors import UserError
from megaring.megatron import checkpoint, parallel
from megaring.megatron.model import build_model
from megaring.rollout.assess import Group
from megaring.rollout.calibration import Calibration
from megaring.rollout.layout import LAYOUTS
from megaring.rollout.ranks import Ranks
from megaring.rollout.runner import Runner
from megaring.rollout.worker_config import WorkerConfig

_GPU_SHARE = 0.8  # of the memory that is free once the model is there
_CPU_BYTES = 64 << 20


def start(config: WorkerConfig) -> Runner:
    """Build this rank's part and join its peers; collective. Raises UserError for what cannot be served."""
    model, size = config.model, config.ranks
    device = parallel.start(config.parallel, seed=config.seed)
    (chunk,) = build_model(model, config.parallel, seed=config.seed)
    if config.load is not None:
        path = checkpoint.newest(config.load) or config.load
        checkpoint.load_weights(path, chunk, asdict(model) | {"padded_vocab_size": model.padded_vocab_size})
    if model.bf16:
        chunk.bfloat16()
    group = parallel_state.get_tensor_model_parallel_group()
    ranks = Ranks.over(group, timedelta(seconds=config.wait)) if size > 1 else Ranks.single()
    memory = config.memory
    if memory is None:
        memory = int(_GPU_SHARE * torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else _CPU_BYTES
        memory = min(ranks.gather_rows(torch.tensor([memory], device=device), [1] * size).tolist())
    try:
        return Runner(chunk, ranks, memory=memory, layout=LAYOUTS[config.layout], vocab_size=model.vocab_size)
    except ValueError as error:
        raise UserError(f"{error} (--memory is {memory / 2**20:,.0f} MiB a rank)") from None


def cost_group(runner: Runner, calibration: Calibration) -> Group:
    """What the cost model has to know of a worker."""
    arena = runner.arena
    reserve = runner.room.reserve * arena.unit_bytes
    return Group(runner.shape, runner.ranks.size, arena.units * arena.unit_bytes, reserve, calibration.constants)


def stop(runner: Runner, release: Callable[[], None] | None = None) -> None:
    """Leave the groups; on rank 0, ``release`` ends the followers' loops first."""
    if release is not None:
        release()
    parallel.stop()
