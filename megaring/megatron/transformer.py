"""From our settings to Megatron's ``TransformerConfig``."""

from __future__ import annotations

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from megaring.megatron.config import ModelConfig, ParallelConfig
from megaring.megatron.spec import use_transformer_engine


def transformer_config(model: ModelConfig, parallel: ParallelConfig) -> TransformerConfig:
    """The configuration of a checked set-up. Kernel fusions that need Transformer Engine are on where it is in use."""
    on_gpu, engine = torch.cuda.is_available(), use_transformer_engine()
    dtype = torch.bfloat16 if model.bf16 else torch.float32
    experts = {}
    if model.num_experts is not None:
        experts = {
            "num_moe_experts": model.num_experts,
            "moe_ffn_hidden_size": model.moe_ffn_hidden_size,
            "moe_router_topk": model.moe_router_topk,
            "moe_router_load_balancing_type": model.moe_router_load_balancing_type,
            "moe_aux_loss_coeff": model.moe_aux_loss_coeff,
            "moe_z_loss_coeff": model.moe_z_loss_coeff,
            "moe_router_dtype": "fp32",
            "moe_grouped_gemm": model.moe_grouped_gemm and engine,  # spec.layer_spec has its own without the engine
            "moe_permute_fusion": engine,
        }
    recompute = {}
    if model.recompute_granularity is not None:
        recompute = {
            "recompute_granularity": model.recompute_granularity,
            "recompute_method": model.recompute_method,
            "recompute_num_layers": model.recompute_num_layers,
        }
    return TransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_query_groups,
        kv_channels=model.kv_channels,
        ffn_hidden_size=model.ffn_hidden_size,
        normalization="RMSNorm",
        layernorm_epsilon=model.norm_epsilon,
        qk_layernorm=model.qk_layernorm,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        attention_dropout=model.attention_dropout,
        hidden_dropout=model.hidden_dropout,
        init_method_std=model.init_method_std,
        perform_initialization=False,  # parameters.initialise does it, independently of the layout
        use_cpu_initialization=not on_gpu,
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        sequence_parallel=parallel.tensor_model_parallel_size > 1,
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
        pipeline_dtype=dtype,
        variable_seq_lengths=True,
        deallocate_pipeline_outputs=True,
        context_parallel_size=parallel.context_parallel_size,
        expert_model_parallel_size=parallel.expert_model_parallel_size,
        expert_tensor_parallel_size=parallel.expert_tensor_parallel_size,
        moe_token_dispatcher_type="alltoall",  # checked even for a dense model
        calculate_per_token_loss=True,
        params_dtype=dtype,
        bf16=model.bf16,
        transformer_impl="transformer_engine" if engine else "local",
        apply_rope_fusion=engine,
        bias_activation_fusion=engine,
        bias_dropout_fusion=engine,
        masked_softmax_fusion=False,
        persist_layer_norm=engine,
        gradient_accumulation_fusion=False,
        **experts,
        **recompute,
    )
