"""The kernels as torch operators, ``megaring::forward`` and ``megaring::backward``, so that graphs can hold calls.

An operator takes tensors and numbers, and a call needs its plan and arena besides: those are a ``Site``, which the
operator finds by its number. Whoever makes a site keeps it for as long as calls or graphs use it. The operators return
new tensors and change nothing that a graph could see; calls of one site run in the order of one stream.

They have fake implementations (shapes without launching). The gradient of the first is the second, which has none; the
log-sum-exp is not differentiable.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch.autograd.function import once_differentiable

from megaring.errors import UserError
from megaring.kernels.arena import Domain
from megaring.kernels.megaring_backward import BackwardCall, DeviceBackwardPlan, megaring_backward
from megaring.kernels.megaring_forward import DevicePlan, RankCall, megaring_forward

Outputs = tuple[torch.Tensor, torch.Tensor]
Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

_numbers = itertools.count()
_sites: WeakValueDictionary[int, Site] = WeakValueDictionary()


@dataclass(frozen=True)
class Launch:
    """How calls are launched, the same on all ranks of a domain.

    timeout_s: bound of every wait for another rank, in seconds. reserved_sms: SMs left free for collectives that other
    streams run meanwhile; without them such a collective and a call could wait for each other until the bound.
    """

    timeout_s: float = 60.0
    reserved_sms: int = 0


class Site:
    """Where calls of one rank find their plan, its domain and the launch; ``number`` is what the operators take.

    gradients: the plan of the backward call, for sites whose calls may be differentiated. heads_per_task: its tasks'.
    """

    def __init__(
        self,
        plan: DevicePlan,
        domain: Domain,
        launch: Launch | None = None,
        gradients: DeviceBackwardPlan | None = None,
        heads_per_task: int = 1,
    ):
        self.plan = plan
        self.domain = domain
        self.launch = launch or Launch()
        self.gradients = gradients
        self.heads_per_task = heads_per_task
        self.number = next(_numbers)
        _sites[self.number] = self


def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, site: int, softmax_scale: float) -> Outputs:
    """``torch.ops.megaring.forward``, differentiable, by the shortest way.

    Being compiled it is that operator. Otherwise the kernels are launched from an autograd function, since a call
    through the dispatcher and back costs the host several times what the launches do.
    """
    if torch.compiler.is_compiling():
        return torch.ops.megaring.forward(q, k, v, site, softmax_scale)
    if not (torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))):
        return attend(q, k, v, site, softmax_scale)
    return _Attention.apply(q, k, v, site, softmax_scale)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, site: int, softmax_scale: float) -> Outputs:
    """Launch: ``(out [rows, Hq, D], lse [rows, Hq])`` of packed ``q [rows, Hq, D]`` and ``k, v [rows, Hkv, D]``.

    Inputs that the copy engine cannot address are copied first. Raises UserError when no site has that number any more,
    and what ``megaring_forward`` raises.
    """
    found = _find(site)
    out, lse = shapes(q, k, v, site, softmax_scale)
    shared = found.plan.plan.ranks > 1  # then others wait for this rank, even if it holds nothing
    if len(q) or shared:
        q = _addressable(q, adjacent=False)
        k, v = (_addressable(x, adjacent=shared) for x in (k, v))
        megaring_forward(
            found.domain,
            [RankCall(found.plan, q, k, v, out, lse)],
            softmax_scale=softmax_scale,
            timeout_s=found.launch.timeout_s,
            reserved_sms=found.launch.reserved_sms,
        )
    return out, lse


def differentiate(
    gradient: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    site: int,
    softmax_scale: float,
) -> Gradients:
    """Launch: ``(dq, dk, dv)`` shaped as q, k and v, from the output's gradient ``[rows, Hq, D]``.

    Raises UserError for a site that was made without gradients, and what ``attend`` raises.
    """
    found = _find(site)
    if found.gradients is None:
        raise UserError(f"attention site {site} was made for calls without gradients; make it where they are enabled")
    dq, dk, dv = gradient_shapes(gradient, q, k, v, out, lse, site, softmax_scale)
    shared = found.plan.plan.ranks > 1
    if len(q) or shared:
        q, gradient = (_addressable(x, adjacent=False) for x in (q, gradient))
        k, v = (_addressable(x, adjacent=shared) for x in (k, v))
        workspace = found.domain.workspace(len(found.gradients.plan.query_tiles), *q.shape[1:])
        forward = RankCall(found.plan, q, k, v, out, lse)
        megaring_backward(
            found.domain,
            [BackwardCall(found.gradients, forward, gradient, dq, dk, dv, workspace)],
            softmax_scale=softmax_scale,
            heads_per_task=found.heads_per_task,
            timeout_s=found.launch.timeout_s,
            reserved_sms=found.launch.reserved_sms,
        )
    return dq, dk, dv


def gradient_shapes(
    gradient: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    site: int,
    softmax_scale: float,
) -> Gradients:
    """The gradients' shapes and types, uninitialised: contiguous whatever the inputs' strides are."""
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def shapes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, site: int, softmax_scale: float) -> Outputs:
    """The outputs' shapes and types, uninitialised: contiguous whatever the inputs' strides are."""
    return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=torch.float32)


def _addressable(x: torch.Tensor, *, adjacent: bool) -> torch.Tensor:
    """``x`` where the copy engine can address it (contiguous columns, 16-byte start and strides), else a copy.

    adjacent: whether rows are sent as they are, which needs heads without gaps between them.
    """
    fits = x.stride(2) == 1 and x.stride(0) % 8 == 0 and x.stride(1) % 8 == 0 and x.data_ptr() % 16 == 0
    if adjacent and x.shape[1] > 1:
        fits &= x.stride(1) == x.shape[2]
    return x if fits else x.clone(memory_format=torch.contiguous_format)  # contiguous() keeps an odd start


def _find(site: int) -> Site:
    found = _sites.get(site)
    if found is None:
        raise UserError(f"attention site {site} is gone; keep its shards (DeviceShards) while calls or graphs use them")
    return found


def _save(ctx: Any, inputs: tuple[Any, ...], output: Outputs) -> None:
    q, k, v, ctx.site, ctx.softmax_scale = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, *output)


def _differentiate(ctx: Any, gradient: torch.Tensor | None, _: None) -> tuple[torch.Tensor | None, ...]:
    if gradient is None:
        return (None,) * 5
    saved = ctx.saved_tensors
    return *torch.ops.megaring.backward(gradient, *saved, ctx.site, ctx.softmax_scale), None, None


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Outputs:
        output = attend(*inputs)
        _save(ctx, inputs, output)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor | None, _: None) -> tuple[torch.Tensor | None, ...]:
        if gradient is None:
            return (None,) * 5
        return *differentiate(gradient, *ctx.saved_tensors, ctx.site, ctx.softmax_scale), None, None


# A site is a SymInt, so that a graph compiled for one step takes the numbers of later ones.
# Library.define costs a call 19 us of host time, torch.library.custom_op 48.
_library = torch.library.Library("megaring", "DEF")
_library.define(
    "forward(Tensor q, Tensor k, Tensor v, SymInt site, float softmax_scale) -> (Tensor, Tensor)",
    tags=torch.Tag.pt2_compliant_tag,
)
_library.define(
    "backward(Tensor gradient, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, SymInt site, "
    "float softmax_scale) -> (Tensor, Tensor, Tensor)",
    tags=torch.Tag.pt2_compliant_tag,
)
_library.impl("forward", attend, "CUDA")
_library.impl("backward", differentiate, "CUDA")
torch.library.register_fake("megaring::forward", shapes, lib=_library)
torch.library.register_fake("megaring::backward", gradient_shapes, lib=_library)
torch.library.register_autograd("megaring::forward", _differentiate, setup_context=_save, lib=_library)
