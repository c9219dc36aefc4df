"""The type of everything that is added up over blocks of keys."""

import torch


def wide(dtype: torch.dtype) -> torch.dtype:
    """fp32, or fp64 for fp64: the type of LSE, of merged outputs and of summed gradients for inputs of ``dtype``."""
    return torch.float64 if dtype == torch.float64 else torch.float32
