"""The ways to attend across ranks, fastest first, and the choice among them.

A backend is a module with ``refusal(request) -> str | None``, why it cannot serve a request, and
``attend(request) -> (out, lse)``; it may have ``reservation(request) -> str | None``, why ``auto`` should pass it over.
It is imported when it is first considered.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import ModuleType

import torch
import torch.distributed as dist

from megaring.device_shards import DeviceShards

MODULES = {
    "fused": "megaring.backends.fused",
    "ring": "megaring.backends.ring",
    "reference": "megaring.backends.reference",
}


@dataclass(frozen=True, eq=False)
class Request:
    """One checked call of ``megaring.attention``; every argument has its final value.

    ``group`` is None exactly when the placement has one rank and nothing is communicated.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    shards: DeviceShards
    group: dist.ProcessGroup | None
    softmax_scale: float
    causal: bool
    deterministic: bool


@dataclass(frozen=True)
class Choice:
    """A backend that takes the request, and why each faster one does not."""

    name: str
    module: ModuleType
    refusals: tuple[str, ...]


def choose(name: str, request: Request) -> Choice:
    """The backend for ``request``: the named one, or with ``auto`` the first in ``MODULES`` that takes it.

    Raises ValueError, with the reasons, when the name is unknown or no backend takes the request.
    """
    if name != "auto" and name not in MODULES:
        raise ValueError(f"backend {name!r} is unknown; choose one of auto, {', '.join(MODULES)}")
    refusals = []
    for candidate in MODULES if name == "auto" else (name,):
        module = importlib.import_module(MODULES[candidate])
        reason = module.refusal(request)
        if reason is None and name == "auto" and hasattr(module, "reservation"):
            reason = module.reservation(request)
        if reason is None:
            return Choice(candidate, module, tuple(refusals))
        refusals.append(f"{candidate}: {reason}")
    raise ValueError(f"attention backend {name!r} cannot take this call ({'; '.join(refusals)})")
