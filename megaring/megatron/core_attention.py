"""Core attention of a Megatron layer: the one attention call that crosses ranks."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

import megaring
from megaring.megatron.params import ShardParams


class MegaRingAttention(nn.Module):
    """Put it in ``spec.submodules.self_attention.submodules.core_attention``. It has no parameters.

    Called with ``q [rows, 1, heads, d]`` and ``k, v [rows, 1, kv_heads, d]`` after norms and RoPE, heads already
    divided by tensor parallelism; returns ``[rows, 1, heads * d]``. Causality and sequence bounds come from the
    shards in ``packed_seq_params``; a mask or a bias is refused.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        **ignored: Any,
    ) -> None:
        super().__init__()
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        if dropout:
            raise ValueError(f"attention across ranks has no dropout, but attention_dropout is {dropout}")
        if config.window_size is not None:
            raise ValueError(f"attention across ranks has no sliding window, but window_size is {config.window_size}")
        if attention_type != "self":
            raise ValueError(f"attention across ranks is self-attention, not {attention_type}")
        self.softmax_scale = config.kv_channels**-0.5 if softmax_scale is None else softmax_scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        /,
        *,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: ShardParams | None = None,
    ) -> torch.Tensor:
        """Attention of this rank's rows over their whole sequences."""
        if not isinstance(packed_seq_params, ShardParams):
            raise TypeError("core attention takes packed_seq_params=ShardParams; see megaring.megatron.params")
        if attention_mask is not None or attention_bias is not None:
            raise ValueError("attention across ranks takes no mask and no bias; sequences bound it")
        out = megaring.attention(
            query.squeeze(1),
            key.squeeze(1),
            value.squeeze(1),
            packed_seq_params.shards,
            group=packed_seq_params.group,
            backend=packed_seq_params.backend,
            softmax_scale=self.softmax_scale,
            deterministic=packed_seq_params.deterministic,
        )
        return out.reshape(out.shape[0], 1, -1)
