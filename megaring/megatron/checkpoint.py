"""Checkpoints: written beside their final name and renamed when whole, so that a killed run leaves the last one usable.

``ROOT/iter_0000020/`` holds weights, optimizer, schedule, random states and the data position in Megatron-Core's
distributed format, which another layout of ranks can read. ``latest_checkpointed_iteration.txt`` names the newest for
Megatron's own tools; resuming looks at the folders themselves.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import multiprocessing
import os
import re
import shutil
import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.managers import SyncManager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megaring.errors import UserError

TRACKER = "latest_checkpointed_iteration.txt"
SUMMARY = "megaring.json"
_PR_SET_PDEATHSIG = 1  # <sys/prctl.h>
_NAME = re.compile(r"iter_(\d{7})")


@dataclass(frozen=True)
class Trainee:
    """What a checkpoint saves and restores: model chunks under DDP, their optimizer and its schedule."""

    chunks: list[Any]
    optimizer: Any
    scheduler: Any


def start_queue() -> None:
    """Start the process through which Megatron-Core's writers report, while forking is still cheap and safe.

    Left alone, the first save spawns it, which imports the main script and torch anew (up to half a minute on two
    cores), and it outlives a rank that is killed, with the rank's output still open. Call it before process groups,
    threads or a GPU are in use.
    """
    if filesystem_async._results_queue is None:
        manager = SyncManager(ctx=multiprocessing.get_context("fork"))
        manager.start(initializer=_end_with_parent)
        filesystem_async._results_queue = manager.Queue()


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def newest(root: Path) -> Path | None:
    """The newest whole checkpoint under ``root``, or None. A folder has its final name only when it is whole."""
    found = [path for path in root.glob("iter_*") if _NAME.fullmatch(path.name) and (path / SUMMARY).is_file()]
    return max(found, key=lambda path: path.name, default=None)


def save(
    root: Path,
    iteration: int,
    trainee: Trainee,
    progress: Mapping[str, Any],
    layout: Mapping[str, int],
    model: Mapping[str, Any],
    keep: int,
) -> Path:
    """Write ``root/iter_<iteration>`` collectively and remove all but the ``keep`` newest.

    progress: JSON-able, equal on every rank (the data position). layout: degrees of parallelism. model: its shape,
    compared when the checkpoint is read.
    """
    final = root / f"iter_{iteration:07d}"
    partial = root / f".partial_{final.name}"
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    state = _sharded_state(trainee, is_loading=False, with_optimizer=True, with_rng=True)
    dist_checkpointing.save(state, str(partial))
    dist.barrier()
    if dist.get_rank() == 0:
        summary = {"iteration": iteration, "layout": dict(layout), "model": dict(model), "progress": dict(progress)}
        _write(partial / SUMMARY, json.dumps(summary, indent=1))
        if final.exists():  # the same step saved again by a resumed run
            shutil.rmtree(final)
        partial.rename(final)
        _sync_folder(root)
        _write(root / TRACKER, str(iteration))
        for old in sorted(path for path in root.glob("iter_*") if _NAME.fullmatch(path.name))[:-keep]:
            shutil.rmtree(old)
    dist.barrier()
    return final


def load(
    path: Path, trainee: Trainee, layout: Mapping[str, int], model: Mapping[str, Any], *, weights_only: bool
) -> dict[str, Any]:
    """Restore ``trainee`` from ``path`` collectively; returns the summary (``iteration``, ``progress``, ...).

    With ``weights_only`` optimizer, schedule and random states stay as they are. Random states are restored only on
    an equal layout. Raises UserError when the model has another shape or the optimizer state cannot move.
    """
    summary = read_summary(path)
    for name, value in model.items():
        if summary["model"].get(name) != value:
            raise UserError(
                f"checkpoint {path} has {name} {summary['model'].get(name)}, this run {value}; "
                "give the same model options, or another --load"
            )
    same_layout = summary["layout"] == dict(layout)
    if not weights_only and not same_layout:
        _check_optimizer_moves(path, summary["layout"], layout)
    optimizer = trainee.optimizer
    with_rng = same_layout and not weights_only
    with contextlib.nullcontext() if weights_only else _readable_distributed(optimizer):
        wanted = _sharded_state(trainee, is_loading=True, with_optimizer=not weights_only, with_rng=with_rng)
        loaded = dist_checkpointing.load(wanted, str(path))
        for index, chunk in enumerate(trainee.chunks):
            chunk.module.load_state_dict(loaded[f"model{index}"])
        if weights_only:
            optimizer.reload_model_params()
            return summary
        optimizer.load_state_dict(loaded["optimizer"])
    _restore_steps(optimizer)
    trainee.scheduler.load_state_dict(loaded["scheduler"])
    if same_layout:
        _set_rng(loaded["rng"])
    return summary


def load_weights(path: Path, chunk: torch.nn.Module, model: Mapping[str, Any]) -> dict[str, Any]:
    """Restore the weights of an unwrapped, whole model from ``path`` collectively, on any layout; returns the summary.

    ``model``: its options by name, of which those that the checkpoint records must agree. Raises UserError where they
    do not.
    """
    summary = read_summary(path)
    for name, value in summary["model"].items():
        if name in model and model[name] != value:
            raise UserError(
                f"checkpoint {path} has {name} {value}, this model {model[name]}; give the same model options, or "
                "another --load"
            )
    state = {"model0": chunk.sharded_state_dict(prefix="", metadata=_metadata())}
    chunk.load_state_dict(dist_checkpointing.load(state, str(path))["model0"])
    return summary


def read_summary(path: Path) -> dict[str, Any]:
    """The JSON summary of a checkpoint. Raises UserError when ``path`` is not one."""
    try:
        return json.loads((path / SUMMARY).read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise UserError(f"{path} is not a whole checkpoint of this project ({error}); choose another --load") from None


def _check_optimizer_moves(path: Path, saved: Mapping[str, int], layout: Mapping[str, int]) -> None:
    """Refuse the layouts between which Megatron-Core keeps optimizer state in different forms."""
    experts, sharded = "expert_model_parallel_size", "use_distributed_optimizer"
    if (saved[experts] > 1) != (layout[experts] > 1):
        name, between, remedy = experts, "1 and more", "a size on the same side"
    elif saved[sharded] != layout[sharded]:
        name, between, remedy = sharded, "a sharded optimizer and a whole one", "the same setting"
    else:
        return
    raise UserError(
        f"checkpoint {path} was saved with {name} {saved[name]}, this run has {layout[name]}: optimizer state does not "
        f"move between {between}; give {remedy}, or --finetune for weights only"
    )


def _metadata() -> dict[str, Any]:
    return {
        "distrib_optim_sharding_type": "fully_reshardable",
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "chained_optim_avoid_prefix": True,
    }


def _sharded_state(trainee: Trainee, *, is_loading: bool, with_optimizer: bool, with_rng: bool) -> dict[str, Any]:
    metadata = _metadata()
    models = {
        f"model{index}": chunk.module.sharded_state_dict(prefix=_prefix(index, len(trainee.chunks)), metadata=metadata)
        for index, chunk in enumerate(trainee.chunks)
    }
    state: dict[str, Any] = dict(models)
    if with_optimizer:
        model_state = models["model0"] if len(models) == 1 else models
        state["optimizer"] = trainee.optimizer.sharded_state_dict(model_state, is_loading=is_loading, metadata=metadata)
        state["scheduler"] = trainee.scheduler.state_dict()
    if with_rng:
        world = dist.get_world_size()
        state["rng"] = ShardedObject("rng", _get_rng(), (world,), (dist.get_rank(),))
    return state


def _prefix(index: int, chunks: int) -> str:
    return "" if chunks == 1 else f"chunk{index}."


def _get_rng() -> dict[str, Any]:
    states = {"cpu": torch.get_rng_state(), "trackers": tensor_parallel.get_cuda_rng_tracker().get_states()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _set_rng(states: Mapping[str, Any]) -> None:
    torch.set_rng_state(states["cpu"])
    tensor_parallel.get_cuda_rng_tracker().set_states(states["trackers"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def _distributed(optimizer: Any) -> list[DistributedOptimizer]:
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part for part in parts if isinstance(part, DistributedOptimizer)]


def _uses_torch_adam(part: DistributedOptimizer) -> bool:
    return isinstance(part.optimizer, (torch.optim.Adam, torch.optim.AdamW))


@contextlib.contextmanager
def _readable_distributed(optimizer: Any) -> Iterator[None]:
    """Let Megatron-Core 0.19 read a distributed optimizer made of torch's Adam (no transformer-engine, no apex).

    Their state is empty before the first step, and the reader asks the checkpoint for the ``step`` that lives in the
    parameter groups instead.
    """
    parts = [part for part in _distributed(optimizer) if _uses_torch_adam(part)]
    for part in parts:
        part.init_state_fn(part.optimizer, part.config)
        for state in part.optimizer.state.values():
            state.setdefault("step", torch.tensor(0.0))
        part._set_main_param_and_optimizer_states = functools.partial(_set_without_step, type(part), part)
    try:
        yield
    finally:
        for part in parts:
            del part._set_main_param_and_optimizer_states


def _set_without_step(kind: type[DistributedOptimizer], part: DistributedOptimizer, param: Any, tensors: Any) -> None:
    kind._set_main_param_and_optimizer_states(part, param, {"step": None, **tensors})


def _restore_steps(optimizer: Any) -> None:
    """Give every parameter its own ``step`` tensor again.

    Megatron-Core 0.19 lets all parameters share one, which Adam then advances once per parameter.
    """
    for part in _distributed(optimizer):
        if _uses_torch_adam(part):
            steps = {float(group["step"]) for group in part.optimizer.param_groups if "step" in group}
            steps |= {float(state["step"]) for state in part.optimizer.state.values() if "step" in state}
            if len(steps) != 1:
                raise RuntimeError(f"the optimizer state of this checkpoint has steps {sorted(steps)}, not one")
            step = steps.pop()
            for state in part.optimizer.state.values():
                state["step"] = torch.tensor(step)


def _write(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
