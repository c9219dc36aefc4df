"""The forward kernel as a torch operator, ``megaring::forward``, so that graphs can hold calls of it.

An operator takes tensors and numbers, and a call needs its plan and arena besides: those are a ``Site``, which the
operator finds by its number. Whoever makes a site keeps it for as long as calls or graphs use it. The operator returns
new tensors and changes nothing that a graph could see; calls of one site run in the order of one stream.

It has a fake implementation (shapes without launching) and no gradient: differentiating it is an error.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from weakref import WeakValueDictionary

import torch

from megaring.errors import UserError
from megaring.kernels.arena import Domain
from megaring.kernels.megaring_forward import DevicePlan, RankCall, megaring_forward

Outputs = tuple[torch.Tensor, torch.Tensor]

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
    """Where calls of one rank find their plan, its domain and the launch; ``number`` is what the operator takes."""

    def __init__(self, plan: DevicePlan, domain: Domain, launch: Launch | None = None):
        self.plan = plan
        self.domain = domain
        self.launch = launch or Launch()
        self.number = next(_numbers)
        _sites[self.number] = self


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, site: int, softmax_scale: float) -> Outputs:
    """Launch: ``(out [rows, Hq, D], lse [rows, Hq])`` of packed ``q [rows, Hq, D]`` and ``k, v [rows, Hkv, D]``.

    Inputs that the copy engine cannot address are copied first. Raises UserError when no site has that number any more,
    and what ``megaring_forward`` raises.
    """
    found = _sites.get(site)
    if found is None:
        raise UserError(f"attention site {site} is gone; keep its shards (DeviceShards) while calls or graphs use them")
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


def _no_gradient(context: object, *gradients: object) -> None:
    raise NotImplementedError("the fused forward has no backward yet; call it under torch.no_grad")


# A site is a SymInt, so that a graph compiled for one step takes the numbers of later ones.
# Library.define costs a call 19 us of host time, torch.library.custom_op 48.
_library = torch.library.Library("megaring", "DEF")
_library.define(
    "forward(Tensor q, Tensor k, Tensor v, SymInt site, float softmax_scale) -> (Tensor, Tensor)",
    tags=torch.Tag.pt2_compliant_tag,
)
_library.impl("forward", attend, "CUDA")
torch.library.register_fake("megaring::forward", shapes, lib=_library)
torch.library.register_autograd("megaring::forward", _no_gradient, lib=_library)
