"""Attention in one launch of the project's own kernels, forward and backward: Hopper GPUs of one node.

CUDA graphs: make the call once on the stream that the capture will use, so that plan and arena exist, then capture it,
and hold the shards (``megaring.to_device``) for as long as the graph is replayed: its plan lives with them. A graph may
be replayed on any stream, but not beside another call or graph made on the same one; with split sequences all ranks
replay it, like any other call.

A step that splits sequences needs an arena, in which ranks receive each other's keys and values: ``8 * Hkv * D`` bytes
for every token of split sequences that a rank does not hold itself and, where gradients are wanted, another
``8 * Hkv * D`` for every one that it holds. It is made at the first such call and again when a
step needs a larger one, by all ranks together; ``reserve`` makes it ahead.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import math

import torch
import torch.distributed as dist

from megaring.backends import Request
from megaring.device_shards import DeviceShards
from megaring.errors import UserError
from megaring.kernels.arena import TILE, ArenaLayout, Domain
from megaring.kernels.arguments import DOMAIN_RANKS
from megaring.kernels.backward_plan import BackwardPlan, alone, choose_heads_per_task, most_slots, plan_backward
from megaring.kernels.domains import WORDS, Domains, refuse_capture
from megaring.kernels.driver import multiprocessors
from megaring.kernels.forward_plan import arena_tiles, plan_forward
from megaring.kernels.megaring_backward import backward_to_device
from megaring.kernels.megaring_forward import SEND_BYTES, to_device
from megaring.kernels.ops import Launch, Site, call

HEAD_DIMS = (64, 128)
UNORDERED = "its backward adds in no fixed order; train deterministically with another backend"
DTYPES = (torch.bfloat16, torch.float16)

Heads = tuple[int, int, int]  # query heads, KV heads, head dimension

_domains = Domains()
_launch = Launch()


def refusal(request: Request) -> str | None:
    """Why this backend cannot take a request, or None. All ranks of a domain arrive at the same answer.

    Collective at the first request of a process group that splits sequences.
    """
    q, k = request.q, request.k
    if (reason := _machine_refusal(q.device)) is not None:
        return reason
    if q.dtype not in DTYPES:
        return f"it takes bf16 or fp16, not {q.dtype}"
    if q.shape[2] not in HEAD_DIMS:
        return f"it takes a head dimension of 64 or 128, not {q.shape[2]}"
    if request.deterministic and _wants_gradients(request):
        return UNORDERED
    if not request.shards.derive(_splits):
        return None
    if request.shards.shards.ranks > DOMAIN_RANKS:
        return f"it splits sequences over at most {DOMAIN_RANKS} ranks, not {request.shards.shards.ranks}"
    if k.shape[1] * k.shape[2] * 2 > SEND_BYTES:
        return f"it sends at most {SEND_BYTES // 2 // k.shape[2]} KV heads of {k.shape[2]}, not {k.shape[1]}"
    return _domains.refusal(request.group, q.device)


def start_refusal(device: torch.device, dtype: torch.dtype, head_dim: int, deterministic: bool) -> str | None:
    """Why training with these settings cannot use this backend, or None: what is known before the first call."""
    if (reason := _machine_refusal(device)) is not None:
        return reason.replace(f"and q is on {device}", f"not {device}")
    if dtype not in DTYPES:
        return f"it takes bf16 or fp16, not {dtype}"
    if head_dim not in HEAD_DIMS:
        return f"it takes a head dimension of 64 or 128, not {head_dim}"
    return UNORDERED if deterministic else None


def reservation(request: Request) -> str | None:
    """Why ``auto`` passes this backend over for a request that it takes, or None."""
    if request.shards.derive(_splits):
        return "it has not been run on several GPUs yet, and this step splits sequences; ask for it by name to use it"
    return None


def attend(request: Request) -> tuple[torch.Tensor, torch.Tensor]:
    """Output ``[t, Hq, D]`` and LSE ``[t, Hq]`` of a request that ``refusal`` takes.

    Raises UserError at the first call of a placement inside a CUDA-graph capture, and PeerTimeout when an earlier call
    had to stop.
    """
    found = site(
        request.shards,
        (request.q.shape[1], *request.k.shape[1:]),
        causal=request.causal,
        group=request.group,
        gradients=_wants_gradients(request),
    )
    return call(request.q, request.k, request.v, found.number, request.softmax_scale)


def site(
    shards: DeviceShards,
    heads: Heads,
    *,
    causal: bool = True,
    group: dist.ProcessGroup | None = None,
    gradients: bool = False,
) -> Site:
    """What calls on the current stream need besides tensors; its number is an argument of ``megaring::forward``.

    heads: query heads, KV heads, head dimension. gradients: whether the calls may be differentiated. Made at the first
    call for a stream and kept by the shards. Collective when the arena has to be made or to grow.
    """
    stream = torch.cuda.current_stream(shards.device).cuda_stream
    if not shards.derive(_splits):
        return shards.derive(_whole_site, causal, stream, _launch, heads if gradients else None)
    return shards.derive(_shared_site, causal, stream, _launch, heads, gradients, group, _domains.generation)


def configure(*, timeout_s: float = 60.0, reserved_sms: int = 0) -> None:
    """Settings of all later calls, to be made equal on all ranks; see ``Launch``. Captured graphs keep theirs.

    Raises UserError for a bound that is not positive and finite, or a negative number of SMs.
    """
    global _launch
    if not 0 < timeout_s < math.inf:
        raise UserError(f"timeout_s is {timeout_s}; a wait for another rank needs a positive, finite bound in seconds")
    if reserved_sms < 0:
        raise UserError(f"reserved_sms is {reserved_sms}; give the number of SMs to leave free, 0 or more")
    _launch = Launch(timeout_s, reserved_sms)


def reserve(group: dist.ProcessGroup, device: torch.device, tokens: int, kv_heads: int, head_dim: int) -> None:
    """Make the arena of the current stream for steps in which a rank receives up to ``tokens`` tokens. Collective."""
    layout = ArenaLayout(-(-tokens // TILE), kv_heads, head_dim)
    _domains.shared(group, device, torch.cuda.current_stream(device).cuda_stream, layout)


def check() -> None:
    """Raise PeerTimeout if any call so far is known to have stopped: before its results are used, and after graphs.

    It reads host memory; to know of a call that still runs, synchronise first.
    """
    _domains.check()


def rebuild(group: dist.ProcessGroup, device: torch.device) -> None:
    """After a PeerTimeout, forget the arenas of ``group``; later calls make new ones. Collective.

    Every rank of the group calls it, also one that saw no error itself. Graphs captured before must not be replayed.
    """
    _domains.drop(group, device)


@functools.cache
def _machine_refusal(device: torch.device) -> str | None:
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return f"it needs a Hopper GPU, and q is on {device}"
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None:
        return "cuda-bindings is not installed; torch for CUDA 13 brings it"
    return None


def _splits(shards: DeviceShards) -> bool:
    """Whether any sequence of the step is split, held by this rank or not."""
    return any(group.size > 1 for group in shards.shards.placement.groups)


def _wants_gradients(request: Request) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in (request.q, request.k, request.v))


def _whole_site(shards: DeviceShards, causal: bool, stream: int, launch: Launch, heads: Heads | None) -> Site:
    """Nothing is split, so each rank is a domain of its own. heads: where gradients are wanted."""
    refuse_capture()
    if heads is None:
        plan = dataclasses.replace(plan_forward(shards.shards, causal=causal), rank=0, ranks=1)
        return Site(to_device(plan, shards.device), _domains.local(shards.device, stream), launch)
    heads_per_task, sum_all = _tasks(shards, launch, heads)
    gradients = alone(plan_backward(shards.shards, causal=causal, sum_all=sum_all))
    layout = ArenaLayout(0, *heads[1:], gradients.slots) if gradients.slots else WORDS
    return _site(shards, _domains.local(shards.device, stream, layout), launch, gradients, heads_per_task)


def _site(shards: DeviceShards, domain: Domain, launch: Launch, gradients: BackwardPlan, heads_per_task: int) -> Site:
    on_device = backward_to_device(gradients, None, shards.device)
    return Site(on_device.forward, domain, launch, on_device, heads_per_task)


def _tasks(shards: DeviceShards, launch: Launch, heads: Heads) -> tuple[int, bool]:
    """Query heads per task, and whether whole sequences are summed in fp32 because several tasks share their keys."""
    query_heads, kv_heads, _ = heads
    workers = multiprocessors(shards.device.index) - launch.reserved_sms
    chosen = choose_heads_per_task(shards.shards.placement, query_heads, kv_heads, workers)
    return chosen, chosen < query_heads // kv_heads


def _shared_site(
    shards: DeviceShards,
    causal: bool,
    stream: int,
    launch: Launch,
    heads: Heads,
    gradients: bool,
    group: dist.ProcessGroup,
    generation: int,
) -> Site:
    refuse_capture()
    layout = ArenaLayout(arena_tiles(shards.shards, causal), *heads[1:])
    if not gradients:
        domain = _domains.shared(group, shards.device, stream, layout)
        return Site(to_device(plan_forward(shards.shards, causal=causal), shards.device), domain, launch)
    heads_per_task, sum_all = _tasks(shards, launch, heads)
    layout = dataclasses.replace(layout, slots=most_slots(shards.shards, sum_all))
    domain = _domains.shared(group, shards.device, stream, layout)
    plan = plan_backward(shards.shards, causal=causal, sum_all=sum_all)
    return _site(shards, domain, launch, plan, heads_per_task)
