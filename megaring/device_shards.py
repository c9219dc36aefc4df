"""The tensors of one rank's shards: made once per microbatch and shared by all layers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch

from buddyring import Shards

T = TypeVar("T")

# Microbatches whose tensors are kept for callers that pass plain Shards: those of a pipeline in flight, and few more.
KEPT_MICROBATCHES = 16


@dataclass(frozen=True, eq=False)
class DeviceShards:
    """A rank's ``Shards`` with its tensors on one device. Build it with ``to_device``.

    shards: the host's arrays. device: where the tensors are.
    tokens: ``[t]`` int64, positions: ``[t]`` int32, cu_seqlens: ``[n + 1]`` int32, as in ``Shards``.
    """

    shards: Shards
    device: torch.device
    tokens: torch.Tensor
    positions: torch.Tensor
    cu_seqlens: torch.Tensor
    _derived: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    def derive(self, build: Callable[..., T], *args: Hashable) -> T:
        """``build(self, *args)``, made at the first call and kept for all later layers."""
        key = (build, *args)
        if key not in self._derived:
            self._derived[key] = build(self, *args)
        return self._derived[key]


def to_device(shards: Shards | DeviceShards, device: torch.device | str) -> DeviceShards:
    """The tensors of ``shards`` on ``device``. Equal arguments give the same object while it is among the last few.

    Hold the result for the whole microbatch; copies to a GPU run asynchronously, on the current stream.
    Raises TypeError for anything but shards.
    """
    if isinstance(shards, DeviceShards):
        shards = shards.shards
    if not isinstance(shards, Shards):
        raise TypeError(f"shards must be a buddyring.Shards (placement.shards(rank)), not {type(shards).__name__}")
    return _to_device(shards, canonical(device))


@functools.lru_cache(maxsize=KEPT_MICROBATCHES)
def _to_device(shards: Shards, device: torch.device) -> DeviceShards:
    return DeviceShards(
        shards=shards,
        device=device,
        tokens=array_to_device(shards.tokens, device),
        positions=array_to_device(shards.positions, device),
        cu_seqlens=array_to_device(shards.cu_seqlens, device),
    )


def canonical(device: torch.device | str) -> torch.device:
    """The device with its index, as tensors report it: ``cuda`` is the current GPU."""
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def array_to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """A copy of ``array`` on ``device``, without waiting for a GPU."""
    tensor = torch.tensor(array)
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
