"""RMSNorm for layers built without Transformer Engine."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension; torch accumulates in fp32.

    Megatron's own for the local layer spec refuses sequence parallelism. All this one adds is the mark by which
    ``finalize_model_grads`` sums the weight's gradient over the tensor-parallel ranks, each of which saw other rows.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **ignored: Any) -> None:
        super().__init__()
        self.eps = eps
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device))
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[..., hidden_size]`` to the same shape and type."""
        return nn.functional.rms_norm(hidden, hidden.shape[-1:], self.weight, self.eps)
