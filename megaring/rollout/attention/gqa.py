"""Grouped-query attention of one Megatron layer: from rows to queries and cache entries, and back.

``linear_qkv`` has per KV head the rows of its query heads, then those of the key and of the value.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from megaring.rollout.projections import REPLICATED, replicated_linear
from megaring.rollout.ranks import Ranks
from megaring.rollout.rotary import Rotary, Rotation
from megaring.rollout.shape import ModelShape

EFFECTIVE = "effective_weight"  # name of the non-persistent buffer with whole heads where a slice cuts a KV group


class Gqa:
    """The attention of one layer over T ranks. Rows are ``[n, hidden]``, queries ``[n, heads, d]``, cache entries
    ``[n, 2, KV heads, d]``: keys after norm and RoPE, and values.

    ``whole_heads``: with more ranks than KV heads, tensor parallelism's slice of ``linear_qkv`` is not what this rank's
    query heads need. ``rebuild`` gathers that; it is kept beside the arena, in every layout.
    """

    entries_are_local = True  # tensor parallelism makes only the entries of a rank's own KV heads

    def __init__(self, attention: nn.Module, shape: ModelShape, ranks: Ranks, rotation: Rotation) -> None:
        self.rotation = rotation
        self._module, self._shape, self._ranks = attention, shape, ranks
        self.scale = getattr(attention.core_attention, "softmax_scale", None) or shape.head_dim**-0.5
        self.whole_heads = ranks.size > shape.kv_heads

    def rebuild(self) -> None:
        """Make what is derived from the weights again; collective. Call it whenever they have changed."""
        if not self.whole_heads:
            return
        shape, ranks, weight = self._shape, self._ranks, self._module.linear_qkv.weight
        whole = ranks.gather_rows(weight.data, [len(weight)] * ranks.size)
        grouped = whole.view(shape.kv_heads, -1, shape.head_dim, shape.hidden)
        group = ranks.rank * shape.kv_heads // ranks.size
        share = shape.query_heads // ranks.size
        first = ranks.rank * share - group * (shape.query_heads // shape.kv_heads)
        effective = torch.cat((grouped[group, first : first + share], grouped[group, -2:])).flatten(0, 1)
        if EFFECTIVE in self._module.linear_qkv._buffers:
            self._module.linear_qkv._buffers[EFFECTIVE].copy_(effective)
        else:
            self._module.linear_qkv.register_buffer(EFFECTIVE, effective.contiguous(), persistent=False)

    def forget(self) -> None:
        """Free what ``rebuild`` made."""
        if EFFECTIVE in self._module.linear_qkv._buffers:
            delattr(self._module.linear_qkv, EFFECTIVE)

    def project_sharded(self, rows: torch.Tensor, rotary: Rotary) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries of this rank's H/T heads, and entries of its KV heads."""
        linear = self._module.linear_qkv
        weight = linear.get_buffer(EFFECTIVE) if self.whole_heads else linear.weight
        heads = len(self._shape.rank_heads(self._ranks.rank, self._ranks.size))
        return self._split(functional.linear(rows, weight), heads, rotary)

    def project_replicated(self, rows: torch.Tensor, rotary: Rotary) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries and entries of all heads."""
        weight = self._module.linear_qkv.get_buffer(REPLICATED)
        return self._split(functional.linear(rows, weight.flatten(0, 1)), self._shape.kv_heads, rotary)

    def output_sharded(self, results: torch.Tensor) -> torch.Tensor:
        """This rank's share of the output ``[n, hidden]``, to be summed over ranks, from its heads' results."""
        return functional.linear(results.flatten(1), self._module.linear_proj.weight)

    def output_replicated(self, results: torch.Tensor) -> torch.Tensor:
        """The output ``[n, hidden]`` from the results of all heads."""
        return replicated_linear(results.flatten(1), self._module.linear_proj)

    def _split(self, mixed: torch.Tensor, kv_heads: int, rotary: Rotary) -> tuple[torch.Tensor, torch.Tensor]:
        width = self._shape.head_dim
        mixed = mixed.view(len(mixed), kv_heads, mixed.shape[1] // (kv_heads * width), width)
        queries = mixed[:, :, :-2].flatten(1, 2)
        keys, values = mixed[:, :, -2], mixed[:, :, -1]
        if self._module.q_layernorm is not None:
            queries = self._module.q_layernorm(queries)
        if self._module.k_layernorm is not None:
            keys = self._module.k_layernorm(keys)
        return rotary(queries), torch.stack((rotary(keys), values), dim=1)
