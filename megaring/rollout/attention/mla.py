"""Multi-head latent attention of one Megatron layer, absorbed: queries meet the cached latent itself.

With ``c`` the normed latent and ``W_UK``, ``W_UV`` a head's rows of ``linear_kv_up_proj``, a score is
``q_nope . (W_UK c) = (W_UK^T q_nope) . c`` and a result ``W_UV (sum p c)`` (DeepSeek-V2,
https://arxiv.org/abs/2405.04434, section 2.1.2). The products are made per step: nothing absorbed is kept, so nothing
can be stale, and Megatron's ``linear_kv_up_proj`` stays as it is.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from megaring.rollout.projections import REPLICATED, replicated_linear
from megaring.rollout.ranks import Ranks
from megaring.rollout.rotary import Rotary, Rotation
from megaring.rollout.shape import ModelShape


class Mla:
    """The attention of one layer over T ranks. Rows are ``[n, hidden]``, queries ``[n, heads, latent + rotary]``,
    cache entries ``[n, 1, 1, latent + rotary]``: the latent after its norm, and the rotated key that all heads share.
    """

    entries_are_local = False  # every rank makes the whole entry

    def __init__(self, attention: nn.Module, shape: ModelShape, ranks: Ranks) -> None:
        self._module, self._shape, self._widths, self._ranks = attention, shape, shape.mla, ranks
        self.scale = attention.softmax_scale
        self.rotation = Rotation.of(attention.rotary_pos_emb, interleaved=True)

    def rebuild(self) -> None:
        """Nothing here is derived from the weights."""

    def forget(self) -> None:
        """Nothing here is derived from the weights."""

    def project_sharded(self, rows: torch.Tensor, rotary: Rotary) -> tuple[torch.Tensor, torch.Tensor]:
        """Absorbed queries of this rank's H/T heads, and whole entries; one gather where tensor parallelism cuts the
        down projections.
        """
        names = ["linear_kv_down_proj"] + (["linear_q_down_proj"] if self._widths.q_lora_rank else [])
        modules = [getattr(self._module, name) for name in names]
        parts = [functional.linear(rows, module.weight) for module in modules]
        if self._shape.shard_down:
            split = [part.shape[1] for part in parts]
            gathered = self._ranks.gather_columns(torch.cat(parts, dim=1)).unflatten(1, (self._ranks.size, sum(split)))
            parts = [part.flatten(1) for part in gathered.split(split, dim=2)]
        query_input, up = self._query_input(rows, parts), self._query_up().weight
        queries = functional.linear(query_input, up)
        return self._absorb(queries, self._module.linear_kv_up_proj.weight, rotary), self._entries(parts[0], rotary)

    def project_replicated(self, rows: torch.Tensor, rotary: Rotary) -> tuple[torch.Tensor, torch.Tensor]:
        """Absorbed queries of all heads, and entries."""
        parts = [self._down("linear_kv_down_proj", rows)]
        if self._widths.q_lora_rank:
            parts.append(self._down("linear_q_down_proj", rows))
        up = self._query_up().get_buffer(REPLICATED).flatten(0, 1)
        queries = functional.linear(self._query_input(rows, parts), up)
        kv_up = self._module.linear_kv_up_proj.get_buffer(REPLICATED).flatten(0, 1)
        return self._absorb(queries, kv_up, rotary), self._entries(parts[0], rotary)

    def output_sharded(self, results: torch.Tensor) -> torch.Tensor:
        """This rank's share of the output ``[n, hidden]``, to be summed over ranks, from its heads' latent results."""
        values = self._values(results, self._module.linear_kv_up_proj.weight)
        return functional.linear(values, self._module.linear_proj.weight)

    def output_replicated(self, results: torch.Tensor) -> torch.Tensor:
        """The output ``[n, hidden]`` from the latent results of all heads."""
        kv_up = self._module.linear_kv_up_proj.get_buffer(REPLICATED).flatten(0, 1)
        return replicated_linear(self._values(results, kv_up), self._module.linear_proj)

    def _query_up(self) -> nn.Module:
        return self._module.linear_q_up_proj if self._widths.q_lora_rank else self._module.linear_q_proj

    def _query_input(self, rows: torch.Tensor, parts: list[torch.Tensor]) -> torch.Tensor:
        return self._module.q_layernorm(parts[1]) if self._widths.q_lora_rank else rows

    def _down(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        module = getattr(self._module, name)
        weight = module.get_buffer(REPLICATED).flatten(0, 1) if self._shape.shard_down else module.weight
        return functional.linear(rows, weight)

    def _entries(self, combined: torch.Tensor, rotary: Rotary) -> torch.Tensor:
        latent, key = combined.split([self._widths.kv_lora_rank, self._widths.qk_rope], dim=1)
        return torch.cat((self._module.kv_layernorm(latent)[:, None], rotary(key[:, None])), dim=2)[:, None]

    def _absorb(self, queries: torch.Tensor, kv_up: torch.Tensor, rotary: Rotary) -> torch.Tensor:
        widths, heads = self._widths, kv_up.shape[0] // (self._widths.qk_nope + self._widths.v_dim)
        queries = queries.view(len(queries), heads, widths.qk_nope + widths.qk_rope)
        nope, rope = queries.split([widths.qk_nope, widths.qk_rope], dim=2)
        keys = kv_up.unflatten(0, (heads, -1))[:, : widths.qk_nope]
        return torch.cat((torch.einsum("nhd,hdc->nhc", nope, keys), rotary(rope)), dim=2)

    def _values(self, results: torch.Tensor, kv_up: torch.Tensor) -> torch.Tensor:
        weights = kv_up.unflatten(0, (results.shape[1], -1))[:, self._widths.qk_nope :]
        return torch.einsum("nhc,hvc->nhv", results, weights).flatten(1)
