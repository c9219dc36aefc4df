"""Where the new tokens of a step are cached on this rank."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from megaring.rollout.pages import Pages
from megaring.rollout.uploads import upload


@dataclass(frozen=True, eq=False)
class Targets:
    """``rows`` of the entries, int64 ``[m]`` on the device, and the slot and offset of each, ``[m]``."""

    rows: torch.Tensor
    slots: NDArray[np.int64]
    offsets: NDArray[np.int64]

    def units(self, pages: Pages, layer: int, groups: range) -> torch.Tensor:
        """The units of a layer that the tokens go to, int32 ``[m, groups]`` on the device."""
        return pages.device_units(layer, groups, self._device_slots)

    @cached_property
    def device_offsets(self) -> torch.Tensor:
        """``offsets`` on the device, int32."""
        return upload(self.offsets.astype(np.int32), self.rows.device)

    @cached_property
    def _device_slots(self) -> torch.Tensor:
        return upload(self.slots.astype(np.int32), self.rows.device)
