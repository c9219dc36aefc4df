"""Launch of ``csrc/megaring_forward.cu``: checks what it is given, packs the arguments, starts one cooperative grid."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from megaring.errors import UserError
from megaring.kernels import specialisations
from megaring.kernels.arena import Domain
from megaring.kernels.arguments import RECORD_WORDS, Arguments, TensorMap
from megaring.kernels.driver import load, multiprocessors, tensor_map
from megaring.kernels.forward_plan import L2_BUDGET, ForwardPlan, heads_per_section

SEND_BYTES = 16384  # a transfer stage holds at least one row of all KV heads


@dataclass(frozen=True, eq=False)
class DevicePlan:
    """A forward plan with its arrays on a device; made once per step and used by every layer."""

    plan: ForwardPlan
    tiles: torch.Tensor
    segments: torch.Tensor
    sends: torch.Tensor


@dataclass(frozen=True, eq=False)
class RankCall:
    """One rank's tensors.

    q: ``[rows, Hq, D]``; k, v: ``[rows, Hkv, D]``; out: like q, contiguous; lse: ``[rows, Hq]`` float32, contiguous.
    """

    plan: DevicePlan
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor


def to_device(plan: ForwardPlan, device: torch.device) -> DevicePlan:
    """Copy a plan's arrays to a device."""
    tiles, segments, sends = (torch.from_numpy(array).to(device) for array in (plan.tiles, plan.segments, plan.sends))
    return DevicePlan(plan, tiles, segments, sends)


def megaring_forward(
    domain: Domain,
    calls: Sequence[RankCall],
    *,
    softmax_scale: float,
    timeout_s: float = 60.0,
    reserved_sms: int = 0,
    ping_pong: bool = False,
    l2_budget: int = L2_BUDGET,
    slack: int = specialisations.SLACK,
    delays: bool = False,
    folder: Path | None = None,
) -> None:
    """Attend for the ranks in ``calls``, in one launch on the current stream; fills ``out`` and ``lse`` of each.

    domain: the arenas; ``calls`` holds one entry per rank that lives here, in rank order (a rank left out at the end
    never sends, and those that wait for it stop after ``timeout_s`` seconds). softmax_scale: positive. reserved_sms:
    SMs left free. ping_pong: whether the consumer warpgroups take turns on the tensor cores. l2_budget: bytes of a
    section of heads. slack, delays: as in ``specialisations.forward``. Raises UserError for tensors that the kernel
    cannot take and PeerTimeout when an earlier call had to stop.
    """
    domain.check()
    check_calls(domain, calls, softmax_scale)
    first = calls[0]
    query_heads, head_dim = first.q.shape[1:]
    device = domain.device.index
    kernel = load(
        specialisations.forward(
            head_dim,
            bfloat16=first.q.dtype == torch.bfloat16,
            causal=first.plan.plan.causal,
            ping_pong=ping_pong,
            slack=slack,
            delays=delays,
        ),
        device,
        folder,
    )
    arguments = Arguments()
    ctas_per_rank = (multiprocessors(device) - reserved_sms) // len(calls)
    pack(arguments, domain, calls, softmax_scale=softmax_scale, timeout_s=timeout_s, ctas_per_rank=ctas_per_rank)
    arguments.heads_per_section = min(
        heads_per_section(
            call.plan.plan, query_heads=query_heads, kv_heads=first.k.shape[1], head_dim=head_dim, l2_budget=l2_budget
        )
        for call in calls
    )
    kernel.launch(ctas_per_rank * len(calls), specialisations.FORWARD_THREADS, [arguments])


def pack(
    arguments: Arguments,
    domain: Domain,
    calls: Sequence[RankCall],
    *,
    softmax_scale: float,
    timeout_s: float,
    ctas_per_rank: int,
) -> None:
    """Fill in what forward and backward launches have in common."""
    first, layout = calls[0], domain.layout
    arguments.timeout_ns = int(timeout_s * 1e9)
    arguments.flags_offset, arguments.data_offset = layout.flags_offset, layout.data_offset
    arguments.arena_rows, arguments.domain_ranks = layout.rows, domain.ranks
    arguments.ctas_per_rank = ctas_per_rank
    arguments.query_heads, arguments.kv_heads = first.q.shape[1], first.k.shape[1]
    arguments.digest = first.plan.plan.digest
    arguments.scale = softmax_scale * math.log2(math.e)
    for rank, arena in enumerate(domain.arenas):
        arguments.arenas[rank] = arena.data_ptr()
    for slot, call in enumerate(calls):
        _pack(arguments.ranks[slot], domain, slot, call)


def _pack(target, domain: Domain, slot: int, call: RankCall) -> None:
    plan, rank = call.plan.plan, domain.local[slot]
    for name, tensor in (("query", call.q), ("key", call.k), ("value", call.v)):
        if plan.tokens:
            setattr(target, name, TensorMap.from_buffer_copy(tensor_map(tensor)))
    if domain.layout.tiles:
        target.arena = TensorMap.from_buffer_copy(tensor_map(domain.data(rank, call.q.dtype)))
    target.output, target.lse = call.out.data_ptr(), call.lse.data_ptr()
    target.tiles, target.segments = call.plan.tiles.data_ptr(), call.plan.segments.data_ptr()
    target.sends = call.plan.sends.data_ptr()
    target.key_rows, target.value_rows = call.k.data_ptr(), call.v.data_ptr()
    target.key_stride, target.value_stride = call.k.stride(0) * 2, call.v.stride(0) * 2
    target.control = domain.arenas[rank].data_ptr()
    target.record = domain.record.data_ptr() + slot * RECORD_WORDS * 8
    target.num_tiles, target.num_sends = len(plan.tiles), len(plan.sends)
    target.tokens, target.rows, target.rank = plan.tokens, call.out.shape[0], rank


def check_calls(domain: Domain, calls: Sequence[RankCall], softmax_scale: float) -> None:
    """Raise UserError for calls that do not fit the domain, each other or the kernels."""
    if not 1 <= len(calls) <= len(domain.local):
        raise UserError(f"{len(calls)} calls for a domain of {len(domain.local)} ranks here; give one per rank")
    if not softmax_scale > 0:
        raise UserError(f"the fused backend needs a positive softmax_scale, not {softmax_scale}; use the ring backend")
    first = calls[0]
    for rank, call in zip(domain.local, calls, strict=False):
        plan = call.plan.plan
        if (plan.rank, plan.ranks) != (rank, domain.ranks) or plan.digest != first.plan.plan.digest:
            raise UserError(
                f"the call of rank {rank} holds the plan of rank {plan.rank} of {plan.ranks}, or of another placement"
            )
        _check_tensors(domain, call, first)


def _check_tensors(domain: Domain, call: RankCall, first: RankCall) -> None:
    plan, layout = call.plan.plan, domain.layout
    heads, kv_heads, head_dim = call.q.shape[1], call.k.shape[1], call.q.shape[2]
    for name, tensor in (("q", call.q), ("k", call.k), ("v", call.v), ("out", call.out)):
        if tensor.dtype != first.q.dtype or tensor.dtype not in (torch.bfloat16, torch.float16):
            raise UserError(f"{name} is {tensor.dtype}; the fused backend takes bfloat16 or float16, the same for all")
        if tensor.device != domain.device:
            raise UserError(f"{name} is on {tensor.device}, the arena on {domain.device}")
        if tensor.shape[0] < plan.tokens or tensor.shape[2] != head_dim:
            raise UserError(
                f"{name} has shape {tuple(tensor.shape)}; expected at least {plan.tokens} rows of {head_dim}"
            )
        if tensor.stride(2) != 1 or tensor.stride(1) % 8 or tensor.stride(0) % 8 or tensor.data_ptr() % 16:
            raise UserError(f"{name} needs contiguous columns and 16-byte strides; call contiguous() on it")
    if (heads, kv_heads) != (first.q.shape[1], first.k.shape[1]) or heads % kv_heads or call.v.shape[1] != kv_heads:
        raise UserError(f"{heads} query heads over {kv_heads} key and {call.v.shape[1]} value heads do not divide")
    if call.out.shape != call.q.shape or not call.out.is_contiguous():
        raise UserError("out must be contiguous and shaped as q")
    if call.lse.shape != call.q.shape[:2] or call.lse.dtype != torch.float32 or not call.lse.is_contiguous():
        raise UserError("lse must be contiguous float32 of shape [rows, query heads]")
    if plan.arena_tiles > layout.tiles:
        raise UserError(f"the plan needs {plan.arena_tiles} arena tiles, the arena has {layout.tiles}; grow it")
    if not layout.tiles:
        return
    if (kv_heads, head_dim) != (layout.kv_heads, layout.head_dim):
        raise UserError(f"the arena is laid out for {layout.kv_heads} KV heads of {layout.head_dim}")
    if kv_heads * head_dim * 2 > SEND_BYTES:
        raise UserError(f"{kv_heads} KV heads of {head_dim} are over the {SEND_BYTES} bytes of a transfer stage")
    for name, tensor in (("k", call.k), ("v", call.v)):
        if kv_heads > 1 and tensor.stride(1) != head_dim:
            raise UserError(f"the heads of {name} must be adjacent to be sent; call contiguous() on it")
