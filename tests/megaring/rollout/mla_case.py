"""Tiny MLA models of the DeepSeek kinds from Megatron's local spec, with a plain core attention of our own.

(Megatron's own for the local spec refuses the widths of MLA.)
"""

from __future__ import annotations

import logging
import zlib
from dataclasses import replace

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import MLATransformerConfig
from rollout_case import as_type, over_ranks, plain_forward
from torch import nn

from megaring.megatron import parallel
from megaring.megatron.config import ParallelConfig
from megaring.megatron.norm import RMSNorm
from megaring.megatron.parameters import placed_parameters
from megaring.rollout.runner import Runner

V2_LITE = {"q_lora_rank": None, "rope_type": "yarn", "mscale": 0.707, "mscale_all_dim": 0.707}
V3 = {
    "q_lora_rank": 12,
    "rope_type": "yarn",
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_num_groups": 2,
    "moe_router_group_topk": 1,
    "moe_router_topk_scaling_factor": 2.5,
}
PLAIN_ROPE = {"q_lora_rank": 12, "rope_type": "rope"}
DENSE_LAYERS, LAYERS = 1, 3


class PlainAttention(nn.Module):
    """Softmax attention over one sequence, ``q, k [n, 1, heads, d]``, ``v [n, 1, heads, v]``."""

    def __init__(self, *args, softmax_scale=None, **kwargs):
        super().__init__()
        self.softmax_scale = softmax_scale

    def forward(self, query, key, value, attention_mask, *args, **kwargs):
        scores = torch.einsum("nbhd,mbhd->bhnm", query, key) * self.softmax_scale
        weights = scores.masked_fill(attention_mask, float("-inf")).softmax(dim=-1)
        return torch.einsum("bhnm,mbhv->nbhv", weights, value).flatten(2)


def make_mla_model(ranks: int, kind: dict, dtype: torch.dtype = torch.float64) -> GPTModel:
    """This rank's part of a model with one dense layer and two of experts, one of them shared."""
    logging.disable(logging.INFO)
    if not parallel_state.model_parallel_is_initialized():
        parallel.start(ParallelConfig(tensor_model_parallel_size=ranks, expert_model_parallel_size=ranks), seed=0)
    config = MLATransformerConfig(
        num_layers=LAYERS,
        hidden_size=32,
        num_attention_heads=4,
        kv_lora_rank=16,
        qk_head_dim=8,
        qk_pos_emb_head_dim=4,
        v_head_dim=6,
        ffn_hidden_size=48,
        num_moe_experts=4,
        moe_ffn_hidden_size=16,
        moe_shared_expert_intermediate_size=16,
        moe_router_topk=2,
        moe_router_load_balancing_type="none",
        moe_router_dtype="fp32",
        moe_layer_freq=[0] * DENSE_LAYERS + [1] * (LAYERS - DENSE_LAYERS),
        moe_token_dispatcher_type="alltoall",
        gated_linear_unit=True,
        activation_func=nn.functional.silu,
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        perform_initialization=False,
        use_cpu_initialization=True,
        tensor_model_parallel_size=ranks,
        expert_model_parallel_size=ranks,
        expert_tensor_parallel_size=1,
        sequence_parallel=ranks > 1,
        transformer_impl="local",
        qk_layernorm=kind["q_lora_rank"] is not None,
        original_max_position_embeddings=64,
        rotary_scaling_factor=4,
        bias_activation_fusion=False,
        apply_rope_fusion=False,
        **kind,
    )
    norm = RMSNorm if config.qk_layernorm else IdentityOp
    specs = [_layer(None, norm)] * DENSE_LAYERS + [_layer(config.num_moe_experts, norm)] * (LAYERS - DENSE_LAYERS)
    model = GPTModel(
        config,
        TransformerBlockSubmodules(layer_specs=specs, layer_norm=RMSNorm),
        vocab_size=128,
        max_sequence_length=1024,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )
    for layer in model.decoder.layers:  # without Q-A the local spec refuses the norm of the latent, which V2-Lite has
        if not config.qk_layernorm:
            layer.self_attention.kv_layernorm = RMSNorm(config, config.kv_lora_rank)
    for place, parameter in placed_parameters(model):
        if place.name.endswith("shared_experts.linear_fc1.weight"):  # gate and up are cut apart
            place = replace(place, pieces=2 * ranks)
        generator = torch.Generator().manual_seed(zlib.crc32(place.name.encode()))
        whole = torch.randn(place.shape, generator=generator) * 0.3
        parameter.data.copy_(place.cut(whole) + (1 if len(place.shape) == 1 else 0))
    for name, buffer in model.named_buffers():
        if name.endswith("expert_bias"):
            buffer.copy_(torch.linspace(-0.2, 0.2, len(buffer)))
    model.eval()
    return as_type(model, dtype)


def make_mla_runner(ranks: int, kind: dict, *, layout: str = "TP", dtype: torch.dtype = torch.float64) -> Runner:
    return over_ranks(make_mla_model(ranks, kind, dtype), ranks, layout)


def plain_mla_logits(rank, world_size, kind, sequences):
    """Logits of whole sequences from Megatron's own forward pass."""
    assert not parallel_state.model_parallel_is_initialized()
    model = make_mla_model(1, kind)
    found = [plain_forward(model, sequence) for sequence in sequences]
    parallel.stop()
    return found


def _layer(experts, norm):
    spec = get_gpt_layer_local_spec(
        num_experts=experts, qk_layernorm=norm is RMSNorm, multi_latent_attention=True, normalization="RMSNorm"
    )
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = RMSNorm
    attention = spec.submodules.self_attention.submodules
    attention.q_layernorm = attention.kv_layernorm = norm
    attention.core_attention = PlainAttention
    return spec
