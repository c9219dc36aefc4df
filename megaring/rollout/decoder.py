"""What of a Megatron decoder no layout changes: embedding, norms, MLP, experts, output layer, over all N rows.

Rows are equal on all ranks. Parameters are those of a model that was built with tensor and expert parallelism over the
same T ranks; their modules' own forward passes would scatter and gather rows by Megatron's rules, so matrices are used
directly and each block ends in one all-reduce. Router and experts are called as they are.
"""

from __future__ import annotations

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.identity_op import IdentityOp
from torch import nn
from torch.nn import functional

from megaring.rollout.experts import StackedExperts
from megaring.rollout.ranks import Ranks


class Decoder:
    """A ``GPTModel`` over ``ranks``. ``layers`` are its layers in order.

    ``stacked``: whether experts run as grouped products over stacked weights, by default on a GPU in bf16.
    """

    def __init__(
        self, model: GPTModel, ranks: Ranks, vocab_size: int | None = None, *, stacked: bool | None = None
    ) -> None:
        _check(model, ranks)
        self.model, self.config, self._ranks = model, model.config, ranks
        self.layers = list(model.decoder.layers)
        self.vocab_size = vocab_size or model.vocab_size
        if not 1 <= self.vocab_size <= model.vocab_size:
            raise ValueError(f"vocab_size is {vocab_size}; the model's embedding has {model.vocab_size} rows")
        # A product over a stack takes the place of a loop over experts, with its launches and its wait for counts.
        # In other types torch's grouped product is such a loop itself.
        if stacked is None:
            stacked = self.device.type == "cuda" and self.dtype == torch.bfloat16
        self._stacks = {id(layer.mlp): self._stack(layer.mlp) for layer in self.layers if stacked and _routed(layer)}

    @property
    def dtype(self) -> torch.dtype:
        """The type of weights and rows."""
        return self.model.decoder.final_layernorm.weight.dtype

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.model.decoder.final_layernorm.weight.device

    def check_adopted(self) -> None:
        """Raise RuntimeError where an expert's parameter was replaced by another tensor."""
        for stack in self._stacks.values():
            stack.check_adopted()

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """``[N]`` token ids to ``[N, hidden]``; each rank has a range of the vocabulary."""
        weight = self.model.embedding.word_embeddings.weight
        local = tokens - self._ranks.rank * len(weight)
        outside = (local < 0) | (local >= len(weight))
        rows = weight[local.masked_fill(outside, 0)].masked_fill(outside[:, None], 0.0)
        return self._ranks.all_reduce(rows)

    def feed_forward(self, layer: nn.Module, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """MLP or experts of normed rows ``[N, hidden]``; with experts, also which a row visited, ``[N, experts]``."""
        chosen = None
        if _routed(layer):
            partial, chosen = self._experts(layer.mlp, rows)
            if layer.mlp.use_shared_expert:
                partial = partial + self._mlp(layer.mlp.shared_experts, rows)
        else:
            partial = self._mlp(layer.mlp, rows)
        return self._ranks.all_reduce(partial), chosen

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """``[n, vocab_size]`` of residual rows ``[n, hidden]``, on every rank, in fp32 (fp64 for fp64)."""
        shared = self.model.share_embeddings_and_output_weights
        weight = self.model.embedding.word_embeddings.weight if shared else self.model.output_layer.weight
        made = functional.linear(self.model.decoder.final_layernorm(rows), weight)
        made = self._ranks.gather_columns(made)[:, : self.vocab_size]
        return made if made.dtype == torch.float64 else made.float()

    def _mlp(self, mlp: nn.Module, rows: torch.Tensor) -> torch.Tensor:
        """This rank's share of an MLP whose hidden columns are divided over the ranks."""
        gate, up = functional.linear(rows, mlp.linear_fc1.weight).chunk(2, dim=-1)
        return functional.linear(self.config.activation_func(gate) * up, mlp.linear_fc2.weight)

    def _experts(self, moe: nn.Module, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's experts on those of all N rows that chose them: a row enters each of its experts once."""
        weights, chosen = moe.router(rows[:, None])
        weights, chosen = weights.view(len(rows), -1), chosen.view(len(rows), -1).bool()
        if id(moe) in self._stacks:
            return self._stacks[id(moe)](rows, weights, chosen), chosen
        here = slice(moe.local_expert_indices[0], moe.local_expert_indices[-1] + 1)
        expert, row = chosen[:, here].t().nonzero(as_tuple=True)
        out = torch.zeros_like(rows)
        if len(row):
            counts = chosen[:, here].sum(dim=0)
            picked = weights[:, here][row, expert].to(rows.dtype)
            visited, _ = moe.experts(rows[row], counts, picked)
            out.index_add_(0, row, visited)
        return out, chosen

    def _stack(self, moe: nn.Module) -> StackedExperts:
        return StackedExperts(
            moe.experts, moe.local_expert_indices[0], self.config.moe_router_topk, self.config.activation_func
        )


def _routed(layer: nn.Module) -> bool:
    return hasattr(layer.mlp, "router")


def _check(model: GPTModel, ranks: Ranks) -> None:
    """Refuse what the forward pass here does not do, each with a remedy."""
    config, size = model.config, ranks.size
    for name, wanted in (
        ("tensor_model_parallel_size", size),
        ("expert_model_parallel_size", size if config.num_moe_experts else None),
        ("expert_tensor_parallel_size", 1 if config.num_moe_experts else None),
        ("pipeline_model_parallel_size", 1),
        ("context_parallel_size", 1),
    ):
        if wanted is not None and getattr(config, name) != wanted:
            raise ValueError(
                f"a worker of {size} ranks needs a model built with {name} {wanted}, not {getattr(config, name)}"
            )
    for name in ("add_bias_linear", "add_qkv_bias", "window_size", "mtp_num_layers", "rotary_interleaved", "fp8"):
        if getattr(config, name, None):
            raise ValueError(f"rollout has no {name}, but the model has {name} {getattr(config, name)}")
    for name in (
        "attention_output_gate",
        "apply_residual_connection_post_layernorm",
        "moe_latent_size",
        "moe_shared_expert_gate",
    ):
        if getattr(config, name, None):
            raise ValueError(f"rollout has no {name}, but the model sets it")
    if not config.gated_linear_unit:
        raise ValueError("rollout has gated MLPs only; build the model with gated_linear_unit")
    if (
        getattr(config, "activation_func_clamp_value", None) is not None
        or config.moe_expert_capacity_factor is not None
    ):
        raise ValueError("rollout has neither activation clamps nor expert capacity factors")
    if model.position_embedding_type != "rope":
        raise ValueError(f"rollout has rotary positions only, but the model has {model.position_embedding_type!r}")
    if any(isinstance(layer.input_layernorm, IdentityOp) for layer in model.decoder.layers):
        raise ValueError(
            "rollout has norms of their own only, but this model's are fused; build it from the local spec"
        )
    double = model.decoder.final_layernorm.weight.dtype == torch.float64
    if double and config.num_moe_experts and config.moe_router_dtype != "fp64":
        raise ValueError(
            f"an fp64 model routes in {config.moe_router_dtype}; set its config's moe_router_dtype to fp64"
        )
