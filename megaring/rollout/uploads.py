"""From NumPy to the device without waiting for it."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray


def upload(array: NDArray, device: torch.device) -> torch.Tensor:
    """The array as a tensor on ``device``. To a GPU it goes through pinned memory, in order of the current stream and
    without waiting: torch's allocator keeps the pinned block until the copy is done.
    """
    tensor = torch.from_numpy(np.require(array, requirements=("C", "W")))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
