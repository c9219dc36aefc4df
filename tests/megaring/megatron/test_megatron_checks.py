"""Settings that cannot work are refused by name before torch is imported."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from megaring.errors import UserError
from megaring.megatron.checks import check_settings
from megaring.megatron.config import ModelConfig, ParallelConfig, TrainConfig

DENSE = ModelConfig(num_layers=4, hidden_size=64, num_attention_heads=8, vocab_size=257, seq_length=512)
EXPERTS = replace(DENSE, num_experts=4)
TRAIN = TrainConfig(train_iters=10, lr=1e-3)
ALONE = ParallelConfig()


def refuse(message, model=DENSE, parallel=ALONE, train=TRAIN, world_size=1):
    with pytest.raises(UserError, match=message):
        check_settings(model, parallel, train, world_size)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attention_dropout": 0.1}, "--attention-dropout is not supported.*set it to 0"),
        ({"hidden_dropout": 0.1}, "--hidden-dropout is not supported"),
        ({"window_size": "128,0"}, "--window-size is not supported"),
        ({"mtp_num_layers": 1}, "--mtp-num-layers is not supported"),
        (
            {"moe_token_dispatcher_type": "allgather"},
            "--moe-token-dispatcher-type allgather is not supported.*alltoall",
        ),
        ({"moe_router_load_balancing_type": "seq_aux_loss"}, "--moe-router-load-balancing-type seq_aux_loss"),
        ({"moe_grouped_gemm": True, "moe_ffn_hidden_size": 36}, "--moe-grouped-gemm is not supported.*multiples of 8"),
        ({"moe_router_topk": 5}, "--moe-router-topk 5 exceeds --num-experts 4"),
        ({"moe_router_topk": 1}, "--moe-router-topk 1"),
        ({"num_query_groups": 3}, "--num-attention-heads 8 is not a multiple of --num-query-groups 3"),
        ({"kv_channels": 7}, "--kv-channels 7 is odd"),
        ({"recompute_granularity": "selective"}, "--recompute-granularity selective"),
        ({"recompute_granularity": "full", "recompute_method": "all"}, "--recompute-method all"),
        ({"recompute_granularity": "full", "recompute_num_layers": 5}, "--recompute-num-layers 5"),
    ],
)
def test_refuses_model(change, message):
    refuse(message, model=replace(EXPERTS, **change))


@pytest.mark.parametrize(
    ("sizes", "world_size", "message"),
    [
        ({"context_parallel_size": 4}, 6, "6 ranks cannot be divided into tensor 1 x pipeline 1 x context 4 = 4"),
        ({"tensor_model_parallel_size": 3}, 3, r"--num-attention-heads \(8\) is not a multiple"),
        (
            {"pipeline_model_parallel_size": 3},
            3,
            "--num-layers 4 is not a multiple of --pipeline-model-parallel-size 3",
        ),
        ({"tensor_model_parallel_size": 2, "sequence_parallel": False}, 2, "--no-sequence-parallel"),
        ({"expert_model_parallel_size": 2, "context_parallel_size": 3}, 3, "does not divide the 3 ranks"),
        ({"expert_model_parallel_size": 8, "context_parallel_size": 8}, 8, "--num-experts 4 is not a multiple"),
        ({"expert_tensor_parallel_size": 2}, 1, "--expert-tensor-parallel-size"),
    ],
)
def test_refuses_layout(sizes, world_size, message):
    refuse(message, model=EXPERTS, parallel=ParallelConfig(**sizes), world_size=world_size)


def test_refuses_experts_in_a_dense_model():
    refuse("without --num-experts", parallel=ParallelConfig(expert_model_parallel_size=2), world_size=2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lr_warmup_iters": 10}, "--lr-warmup-iters 10 leaves nothing of the 10 steps"),
        ({"min_lr": 1.0}, "--min-lr 1.0 is above --lr"),
        ({"num_microbatches": 0}, "--num-microbatches 0 is not at least 1"),
    ],
)
def test_refuses_training(change, message):
    refuse(message, train=replace(TRAIN, **change))


def test_accepts_what_works():
    check_settings(EXPERTS, ALONE, TRAIN, 1)
    check_settings(EXPERTS, ParallelConfig(context_parallel_size=4, expert_model_parallel_size=4), TRAIN, 8)
    sizes = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "context_parallel_size": 2}
    check_settings(DENSE, ParallelConfig(**sizes), TRAIN, 8)
    assert ParallelConfig(**sizes).data_parallel_size(16) == 2
    assert ParallelConfig(**sizes).rank_multiple == 2
    # A dense model has no dispatcher and no balance that could be wrong.
    check_settings(replace(DENSE, moe_token_dispatcher_type="allgather"), ALONE, TRAIN, 1)


def test_defaults_that_follow_from_other_fields():
    assert (DENSE.num_query_groups, DENSE.kv_channels, DENSE.ffn_hidden_size) == (8, 8, 256)
    assert replace(DENSE, ffn_hidden_size=96, moe_ffn_hidden_size=None).moe_ffn_hidden_size == 96
    assert DENSE.padded_vocab_size == 384
    assert replace(DENSE, vocab_size=256).padded_vocab_size == 256
    assert TRAIN.lr_decay_iters == 10


def test_from_options_takes_its_own_names_only():
    options = SimpleNamespace(**vars(DENSE), train_iters=3, lr=0.5, data_path="x")
    assert ModelConfig.from_options(options) == DENSE
    assert TrainConfig.from_options(options) == TrainConfig(train_iters=3, lr=0.5)


def test_neither_torch_nor_megatron_is_imported():
    code = (
        "import sys, megaring.megatron.checks, megaring.megatron.flops;"
        "print([m for m in ('torch', 'megatron', 'numba') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == "[]"
