"""The ways to attend to a placed batch over several GPUs, as contenders with equal inputs and comparable outputs."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch
import torch.distributed as dist

from buddyring.placement import Placement
from megaring.attention import attention
from megaring.backends.local import choose_kernel
from megaring.device_shards import DeviceShards, to_device
from megaring.kernels.checks.contenders import HEAD_DIM, KV_HEADS, QUERY_HEADS, forward_flops
from megaring.kernels.checks.gather import gather_attention, gather_gradients
from megaring.kernels.checks.gradient_contenders import backward_flops
from megaring.kernels.checks.race import Contender

DIFFERENCE_LIMIT = 1e-2  # bf16 outputs of two executors, relative L2
GRADIENT_DIFFERENCE_LIMIT = 2e-2  # the same of gradients, which are rounded more often on their way
WORST = 1e30  # instead of NaN, which a maximum over ranks may lose
SEED = 7


@dataclass(frozen=True, eq=False)
class Placed:
    """A contender on one placement.

    output: of its first call, ``[t, 32, 128]``, or of a backward dQ, dK and dV side by side, ``[t, 48, 128]``; tokens:
    their numbers in the step. difference: from a reference.
    """

    contender: Contender
    output: torch.Tensor
    tokens: torch.Tensor
    difference: float


def placed(
    name: str,
    executor: str,
    placement: Placement,
    rank: int,
    device: torch.device,
    reference: Placed | None = None,
    *,
    backward: bool = False,
) -> tuple[Placed | None, str]:
    """A contender that attends, and its first output compared with that of ``reference`` on the tokens both hold.

    backward: whether it differentiates instead, an output that it has made before.

    Inputs depend on the token alone, so that the outputs of all placements and executors of a batch are comparable.
    Returns None and the reason when the executor refuses the placement, on all ranks alike.
    """
    shards = to_device(placement.shards(rank), device)
    q, k, v = (token_values(shards, heads, kind) for kind, heads in enumerate((QUERY_HEADS, KV_HEADS, KV_HEADS)))
    run: Callable[[], torch.Tensor | tuple[torch.Tensor, ...]]
    try:
        if backward:
            run = DIFFERENTIATE[executor](q, k, v, token_values(shards, QUERY_HEADS, 3), shards)
            output = torch.cat([part[: shards.shards.num_tokens] for part in run()], dim=1)
        else:
            run = functools.partial(RUN[executor], q, k, v, shards)
            output = run()[: shards.shards.num_tokens]
    except ValueError as error:
        return None, str(error).splitlines()[0]
    difference = 0.0 if reference is None else _difference(output, shards.tokens, reference)
    flops = (backward_flops if backward else forward_flops)(placement.lengths)
    return Placed(Contender(name, run, flops), output, shards.tokens, difference), ""


def token_values(shards: DeviceShards, heads: int, kind: int) -> torch.Tensor:
    """``[rows, heads, 128]`` bf16, roughly normal, from the token's number in the step; zeros in rows of no token."""
    made = torch.zeros(shards.shards.rows, heads, HEAD_DIM, dtype=torch.bfloat16, device=shards.device)
    if shards.shards.num_tokens:
        generator = torch.Generator(shards.device).manual_seed(SEED + kind)
        pattern = torch.randn(2, 4099, heads, HEAD_DIM, device=shards.device, generator=generator)
        # A sum of two patterns of coprime periods repeats after 16 million tokens.
        pieces = pattern[0, shards.tokens % 4099] + pattern[1, shards.tokens % 4093]
        made[: len(pieces)] = (pieces / 2**0.5).bfloat16()
    return made


def _difference(output: torch.Tensor, tokens: torch.Tensor, reference: Placed) -> float:
    """Relative L2 distance on the tokens that this rank holds in both placements; 0 where there are none."""
    order = torch.argsort(reference.tokens)
    held = reference.tokens[order]
    place = torch.searchsorted(held, tokens).clamp_(max=max(0, len(held) - 1))
    if len(held) == 0 or len(tokens) == 0:
        return 0.0
    both = held[place] == tokens
    ours, theirs = output[both].float(), reference.output[order[place[both]]].float()
    found = float((ours - theirs).norm() / theirs.norm().clamp(min=1e-30))
    return found if math.isfinite(found) else WORST


def _attention(backend: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, shards: DeviceShards) -> torch.Tensor:
    with torch.no_grad():
        return attention(q, k, v, shards, backend=backend)


def _gather(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, shards: DeviceShards) -> torch.Tensor:
    return gather_attention(q, k, v, shards, _group(shards), local_kernel(q))[0]


def _attention_backward(
    backend: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, gradient: torch.Tensor, shards: DeviceShards
) -> Callable[[], tuple[torch.Tensor, ...]]:
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = attention(*leaves, shards, backend=backend)
    return functools.partial(torch.autograd.grad, out, leaves, gradient, retain_graph=True)


def _gather_backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, gradient: torch.Tensor, shards: DeviceShards
) -> Callable[[], tuple[torch.Tensor, ...]]:
    group, kernel = _group(shards), local_kernel(q)
    out, lse = gather_attention(q, k, v, shards, group, kernel)
    return functools.partial(gather_gradients, gradient, q, k, v, out, lse, shards, group, kernel)


def _group(shards: DeviceShards) -> dist.ProcessGroup | None:
    return dist.group.WORLD if shards.shards.ranks > 1 else None


def local_kernel(q: torch.Tensor) -> ModuleType:
    """What ``ring`` and ``gather`` compute with on this machine."""
    return choose_kernel(q.device, q.dtype, q.shape[2])


RUN: dict[str, Callable[..., torch.Tensor]] = {
    "fused": functools.partial(_attention, "fused"),
    "ring": functools.partial(_attention, "ring"),
    "gather": _gather,
}

# Each makes an output and returns what differentiates it: (dq, dk, dv) of at least the rank's tokens.
DIFFERENTIATE: dict[str, Callable[..., Callable[[], tuple[torch.Tensor, ...]]]] = {
    "fused": functools.partial(_attention_backward, "fused"),
    "ring": functools.partial(_attention_backward, "ring"),
    "gather": _gather_backward,
}
