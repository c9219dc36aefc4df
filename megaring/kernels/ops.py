"""The forward kernel as a torch operator, ``megaring::forward``, so that graphs can hold calls of it.

An operator takes tensors and numbers, and a call needs its plan and arena besides: those are a ``Site``, which the
operator finds by its number. Whoever makes a site keeps it for as long as calls or graphs use it. The operator returns
new tensors and changes nothing that a graph could see; calls of one site run in the order of one stream.

It has a fake implementation (shapes without launching) and no gradient: differentiating it is an error.
"""

from __future__ import annotations

import itertools
from weakref import WeakValueDictionary

import torch

from megaring.errors import UserError
from megaring.kernels.arena import LocalDomain
from megaring.kernels.megaring_forward import DevicePlan, RankCall, megaring_forward

Outputs = tuple[torch.Tensor, torch.Tensor]

_numbers = itertools.count()
_sites: WeakValueDictionary[int, Site] = WeakValueDictionary()


class Site:
    """Where calls of one rank find their plan and its domain of one rank; ``number`` is what the operator takes."""

    def __init__(self, plan: DevicePlan, domain: LocalDomain):
        self.plan = plan
        self.domain = domain
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
    if len(q):
        q, k, v = (_addressable(x) for x in (q, k, v))
        megaring_forward(found.domain, [RankCall(found.plan, q, k, v, out, lse)], softmax_scale=softmax_scale)
    return out, lse


def shapes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, site: int, softmax_scale: float) -> Outputs:
    """The outputs' shapes and types, uninitialised: contiguous whatever the inputs' strides are."""
    return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=torch.float32)


def _addressable(x: torch.Tensor) -> torch.Tensor:
    """``x`` where the copy engine can address it (contiguous columns, 16-byte start and strides), else a copy."""
    fits = x.stride(2) == 1 and x.stride(0) % 8 == 0 and x.stride(1) % 8 == 0 and x.data_ptr() % 16 == 0
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
