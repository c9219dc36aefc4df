"""Which modules a decoder layer is made of."""

from __future__ import annotations

import functools

import torch
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from megaring.megatron.config import ModelConfig
from megaring.megatron.core_attention import MegaRingAttention
from megaring.megatron.experts import GroupedExperts
from megaring.megatron.norm import RMSNorm
from megaring.megatron.router import use_domain_router


def use_transformer_engine() -> bool:
    """Whether layers are built from Transformer Engine's modules: it is installed and there is a GPU."""
    return HAVE_TE and torch.cuda.is_available()


def layer_spec(model: ModelConfig) -> ModuleSpec:
    """The spec of one layer: stock modules, except core attention, router and, without Transformer Engine, norms and
    grouped experts.

    The Transformer Engine variant follows the same interfaces but has not been run: no machine with it was at hand.
    """
    if use_transformer_engine():
        spec = get_gpt_layer_with_transformer_engine_spec(
            num_experts=model.num_experts, moe_grouped_gemm=model.moe_grouped_gemm, qk_layernorm=model.qk_layernorm
        )
    else:
        spec = get_gpt_layer_local_spec(
            num_experts=model.num_experts,
            moe_grouped_gemm=False,
            qk_layernorm=model.qk_layernorm,
            normalization="RMSNorm",
        )
        spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = RMSNorm
        if model.qk_layernorm:
            attention = spec.submodules.self_attention.submodules
            attention.q_layernorm = attention.k_layernorm = RMSNorm
    spec.submodules.self_attention.submodules.core_attention = MegaRingAttention
    if model.num_experts is not None:
        use_domain_router(spec.submodules.mlp)
        if model.moe_grouped_gemm and not use_transformer_engine():
            parts = spec.submodules.mlp.keywords["submodules"]
            parts.experts = functools.partial(GroupedExperts, **parts.experts.keywords)
    return spec


def block_spec(model: ModelConfig, num_layers: int) -> TransformerBlockSubmodules:
    """The spec of a pipeline stage's ``num_layers`` equal layers and, on the last stage, the final norm."""
    final_norm = RMSNorm
    if use_transformer_engine():
        from megatron.core.extensions.transformer_engine import TENorm

        final_norm = TENorm
    return TransformerBlockSubmodules(layer_specs=[layer_spec(model)] * num_layers, layer_norm=final_norm)
