"""Launch of ``csrc/megaring_backward.cu``: checks what it is given, packs the arguments, starts one grid."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from megaring.errors import UserError
from megaring.kernels import specialisations
from megaring.kernels.arena import Domain
from megaring.kernels.arguments import BackwardArguments, TensorMap
from megaring.kernels.backward_plan import CHUNK_TILES, QUERY_TILE, BackwardPlan, queue_items
from megaring.kernels.driver import load, multiprocessors, tensor_map
from megaring.kernels.megaring_forward import DevicePlan, RankCall, check_calls, pack, to_device
from megaring.kernels.workspace import Workspace


@dataclass(frozen=True, eq=False)
class DeviceBackwardPlan:
    """A backward plan with its arrays on a device; made once per step and used by every layer."""

    plan: BackwardPlan
    forward: DevicePlan
    key_tasks: torch.Tensor
    query_tiles: torch.Tensor
    owned: torch.Tensor
    _queues: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict, repr=False)

    def queue(self, groups: int, workers: int) -> torch.Tensor:
        """``queue_items`` on the device, made at its first use."""
        key = (groups, workers)
        if key not in self._queues:
            self._queues[key] = torch.from_numpy(queue_items(self.plan, *key)).to(self.key_tasks.device)
        return self._queues[key]


@dataclass(frozen=True, eq=False)
class BackwardCall:
    """One rank's tensors.

    forward: the call whose gradients are wanted, with the output and LSE that it gave. output_gradient: like its out.
    dq, dk, dv: like q, k, v, contiguous; filled by the call.
    """

    plan: DeviceBackwardPlan
    forward: RankCall
    output_gradient: torch.Tensor
    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor
    workspace: Workspace


def backward_to_device(plan: BackwardPlan, forward: DevicePlan | None, device: torch.device) -> DeviceBackwardPlan:
    """Copy a plan's arrays to a device; ``forward``: the device's copy of its forward plan, if there is one."""
    arrays = (torch.from_numpy(array).to(device) for array in (plan.key_tasks, plan.query_tiles, plan.owned))
    return DeviceBackwardPlan(plan, forward or to_device(plan.forward, device), *arrays)


def megaring_backward(
    domain: Domain,
    calls: Sequence[BackwardCall],
    *,
    softmax_scale: float,
    heads_per_task: int | None = None,
    timeout_s: float = 60.0,
    reserved_sms: int = 0,
    folder: Path | None = None,
) -> None:
    """Differentiate for the ranks in ``calls``, in one launch on the current stream; fills dq, dk and dv of each.

    heads_per_task: query heads of one KV head that a task takes, a divisor of their ratio; all of them by default.
    Fewer need plans made with ``sum_all``. The rest is as in ``megaring_forward``, and so is what it raises.
    """
    domain.check()
    forwards = [call.forward for call in calls]
    check_calls(domain, forwards, softmax_scale)
    first = forwards[0]
    (query_heads, head_dim), kv_heads = first.q.shape[1:], first.k.shape[1]
    ratio = query_heads // kv_heads
    heads_per_task = ratio if heads_per_task is None else heads_per_task
    for call in calls:
        _check(domain, call, heads_per_task, ratio)
    device = domain.device.index
    kernel = load(
        specialisations.backward(
            head_dim,
            bfloat16=first.q.dtype == torch.bfloat16,
            causal=first.plan.plan.causal,
        ),
        device,
        folder,
    )
    arguments = BackwardArguments()
    ctas_per_rank = (multiprocessors(device) - reserved_sms) // len(calls)
    pack(
        arguments.base,
        domain,
        forwards,
        softmax_scale=softmax_scale,
        timeout_s=timeout_s,
        ctas_per_rank=ctas_per_rank,
    )
    arguments.counts_offset, arguments.sums_offset = domain.layout.counts_offset, domain.layout.sums_offset
    arguments.heads_per_task = heads_per_task
    arguments.softmax_scale = softmax_scale
    for slot, call in enumerate(calls):
        _pack(arguments.ranks[slot], call, query_heads // heads_per_task, ctas_per_rank)
    kernel.launch(ctas_per_rank * len(calls), specialisations.FORWARD_THREADS, [arguments])


def _pack(target, call: BackwardCall, groups: int, workers: int) -> None:
    plan, workspace = call.plan, call.workspace
    queue = plan.queue(groups, workers)
    if plan.plan.forward.tokens:
        target.query = TensorMap.from_buffer_copy(tensor_map(call.forward.q, QUERY_TILE))
        target.output_gradient = TensorMap.from_buffer_copy(tensor_map(call.output_gradient, QUERY_TILE))
    target.output_rows, target.output_gradient_rows = call.forward.out.data_ptr(), call.output_gradient.data_ptr()
    target.output_stride, target.output_head_stride, _ = call.forward.out.stride()
    target.output_gradient_stride, target.output_gradient_head_stride, _ = call.output_gradient.stride()
    target.key_tasks, target.items = plan.key_tasks.data_ptr(), queue.data_ptr()
    target.query_tiles, target.owned = plan.query_tiles.data_ptr(), plan.owned.data_ptr()
    target.statistics, target.query_sums = workspace.statistics.data_ptr(), workspace.query_sums.data_ptr()
    target.query_gradient, target.key_gradient = call.dq.data_ptr(), call.dk.data_ptr()
    target.value_gradient = call.dv.data_ptr()
    target.num_key_tasks, target.num_query_tiles = len(plan.plan.key_tasks), len(plan.plan.query_tiles)
    target.num_owned, target.num_items = len(plan.plan.owned), len(queue)
    target.num_counters = -(-len(plan.plan.query_tiles) // CHUNK_TILES) * groups
    target.counters = workspace.counters.data_ptr()


def _check(domain: Domain, call: BackwardCall, heads_per_task: int, ratio: int) -> None:
    plan, forward, gradient = call.plan.plan, call.forward, call.output_gradient
    if heads_per_task < 1 or ratio % heads_per_task:
        raise UserError(f"{heads_per_task} query heads per task do not divide the {ratio} that share a KV head")
    if heads_per_task < ratio and not plan.sum_all:
        raise UserError("tasks of fewer query heads than share a KV head need a plan made with sum_all=True")
    if plan.slots > domain.layout.slots:
        raise UserError(f"the plan sums {plan.slots} tiles, the arena has {domain.layout.slots} slots; grow it")
    if plan.slots and (forward.k.shape[1], forward.k.shape[2]) != (domain.layout.kv_heads, domain.layout.head_dim):
        raise UserError(f"the arena is laid out for {domain.layout.kv_heads} KV heads of {domain.layout.head_dim}")
    if gradient.shape != forward.out.shape or gradient.dtype != forward.out.dtype:
        raise UserError(
            f"the output's gradient is {tuple(gradient.shape)} {gradient.dtype}; it must be like the output"
        )
    if gradient.stride(2) != 1 or gradient.stride(1) % 8 or gradient.stride(0) % 8 or gradient.data_ptr() % 16:
        raise UserError("the output's gradient needs contiguous columns and 16-byte strides; call contiguous() on it")
    for name, found, like in (("dq", call.dq, forward.q), ("dk", call.dk, forward.k), ("dv", call.dv, forward.v)):
        if found.shape != like.shape or found.dtype != like.dtype or not found.is_contiguous():
            raise UserError(f"{name} must be contiguous and shaped as its input")
    if not call.workspace.fits(len(plan.query_tiles), *forward.q.shape[1:]):
        raise UserError(f"the workspace is too small for {len(plan.query_tiles)} query tiles; make a larger one")
