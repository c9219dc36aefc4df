"""What a set-up must fulfil before anything heavy is imported or started. Plain Python: no torch, no megatron.

``check_settings(model, parallel, train, world_size)`` raises ``UserError`` for the first thing that cannot work, by
the name of the option and with the remedy. Every rank computes the same answer from the same options.
"""

from __future__ import annotations

from megaring.errors import UserError
from megaring.megatron.config import ModelConfig, ParallelConfig, TrainConfig


def check_settings(model: ModelConfig, parallel: ParallelConfig, train: TrainConfig, world_size: int) -> None:
    """Raise ``UserError`` unless a model can be built and trained so on ``world_size`` ranks."""
    check_supported(model, parallel)
    check_model(model)
    check_parallel(model, parallel, world_size)
    check_training(train)


def check_supported(model: ModelConfig, parallel: ParallelConfig) -> None:
    """Refuse by name what the parallel path would silently drop or get wrong."""
    refusals = [
        (model.attention_dropout != 0, "--attention-dropout", "attention across ranks has no dropout; set it to 0"),
        (model.hidden_dropout != 0, "--hidden-dropout", "its masks would depend on the placement; set it to 0"),
        (model.window_size is not None, "--window-size", "no attention backend has a sliding window; leave it out"),
        (
            bool(model.mtp_num_layers),
            "--mtp-num-layers",
            "multi-token prediction takes its targets from fixed zigzag neighbours; leave it out",
        ),
        (
            model.num_experts is not None and model.moe_token_dispatcher_type != "alltoall",
            f"--moe-token-dispatcher-type {model.moe_token_dispatcher_type}",
            "ranks hold different numbers of tokens, which only alltoall handles; use alltoall",
        ),
        (
            model.num_experts is not None and model.moe_router_load_balancing_type not in ("aux_loss", "none"),
            f"--moe-router-load-balancing-type {model.moe_router_load_balancing_type}",
            "balance is counted over all tokens of the rank domain; use aux_loss or none",
        ),
        (
            parallel.expert_tensor_parallel_size != 1,
            "--expert-tensor-parallel-size",
            "experts are not split further; leave it at 1 and raise --expert-model-parallel-size",
        ),
        (
            parallel.tensor_model_parallel_size > 1 and not parallel.sequence_parallel,
            "--no-sequence-parallel",
            "with tensor parallelism the rows are split over its ranks; drop the flag",
        ),
        (
            model.moe_grouped_gemm and bool(model.hidden_size % 8 or model.moe_ffn_hidden_size % 8),
            "--moe-grouped-gemm",
            "its rows must be multiples of 16 bytes; make --hidden-size and --moe-ffn-hidden-size multiples of 8",
        ),
    ]
    for asked, option, reason in refusals:
        if asked:
            raise UserError(f"{option} is not supported: {reason}")


def check_model(model: ModelConfig) -> None:
    """The arithmetic of one model, whatever the ranks."""
    heads, groups = model.num_attention_heads, model.num_query_groups
    if heads % groups:
        raise UserError(f"--num-attention-heads {heads} is not a multiple of --num-query-groups {groups}")
    if model.kv_channels % 2:
        raise UserError(f"--kv-channels {model.kv_channels} is odd; RoPE turns pairs, use an even head dimension")
    if model.kv_channels < 1:
        raise UserError(f"--hidden-size {model.hidden_size} is too small for {heads} heads; give --kv-channels")
    if model.num_experts is not None:
        if model.moe_router_topk > model.num_experts:
            raise UserError(f"--moe-router-topk {model.moe_router_topk} exceeds --num-experts {model.num_experts}")
        if model.moe_router_topk < 2:
            raise UserError("--moe-router-topk 1 leaves the router without a gradient; use at least 2")
    if model.recompute_granularity not in (None, "full"):
        raise UserError(f"--recompute-granularity {model.recompute_granularity} is not supported; use full")
    if model.recompute_method not in ("uniform", "block"):
        raise UserError(f"--recompute-method {model.recompute_method} is unknown; use uniform or block")


def check_parallel(model: ModelConfig, parallel: ParallelConfig, world_size: int) -> None:
    """How the model, the parallel sizes and the number of ranks divide each other."""
    tensor, pipeline, context, expert = (
        parallel.tensor_model_parallel_size,
        parallel.pipeline_model_parallel_size,
        parallel.context_parallel_size,
        parallel.expert_model_parallel_size,
    )
    sizes = f"tensor {tensor} x pipeline {pipeline} x context {context}"
    if world_size % parallel.model_parallel_size:
        raise UserError(
            f"{world_size} ranks cannot be divided into {sizes} = {parallel.model_parallel_size}; start a multiple of "
            f"{parallel.model_parallel_size} processes or change the parallel sizes"
        )
    for name, value in (
        ("--num-attention-heads", model.num_attention_heads),
        ("--num-query-groups", model.num_query_groups),
        ("--ffn-hidden-size", model.ffn_hidden_size),
        ("the padded vocabulary", model.padded_vocab_size),
        ("--hidden-size", model.hidden_size),
    ):
        if value % tensor:
            raise UserError(f"{name} ({value}) is not a multiple of --tensor-model-parallel-size {tensor}")
    if model.num_layers % pipeline:
        raise UserError(
            f"--num-layers {model.num_layers} is not a multiple of --pipeline-model-parallel-size {pipeline}"
        )
    layers_per_stage = model.num_layers // pipeline
    if model.recompute_granularity and not 1 <= model.recompute_num_layers <= layers_per_stage:
        raise UserError(
            f"--recompute-num-layers {model.recompute_num_layers} does not fit the {layers_per_stage} layers of a stage"
        )
    ranks_per_stage = world_size // pipeline
    if expert > 1 and model.num_experts is None:
        raise UserError(f"--expert-model-parallel-size {expert} without --num-experts; leave it at 1")
    if ranks_per_stage % expert:
        raise UserError(
            f"--expert-model-parallel-size {expert} does not divide the {ranks_per_stage} ranks of a pipeline stage"
        )
    if model.num_experts is not None and model.num_experts % expert:
        raise UserError(f"--num-experts {model.num_experts} is not a multiple of --expert-model-parallel-size {expert}")


def check_training(train: TrainConfig) -> None:
    """Step counts and the learning-rate schedule."""
    for name in ("train_iters", "num_microbatches", "lr_decay_iters"):
        if getattr(train, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} {getattr(train, name)} is not at least 1")
    if train.lr_warmup_iters >= train.lr_decay_iters:
        raise UserError(
            f"--lr-warmup-iters {train.lr_warmup_iters} leaves nothing of the {train.lr_decay_iters} steps of "
            "--lr-decay-iters (default: --train-iters); shorten it"
        )
    if train.min_lr > train.lr:
        raise UserError(f"--min-lr {train.min_lr} is above --lr {train.lr}")
