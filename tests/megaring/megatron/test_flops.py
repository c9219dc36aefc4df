"""Model FLOPs by hand."""

from __future__ import annotations

import pytest

from megaring.megatron.config import ModelConfig
from megaring.megatron.flops import mfu, model_flops, peak_flops


def test_dense_model_by_hand():
    model = ModelConfig(
        num_layers=1,
        hidden_size=4,
        num_attention_heads=2,
        num_query_groups=1,
        kv_channels=2,
        ffn_hidden_size=8,
        vocab_size=16,
        make_vocab_size_divisible_by=1,
        seq_length=8,
    )
    # Per token: q 4*4, k and v 2*4*2, output 4*4, gate, up and down 3*4*8, logits 4*16 multiply-adds.
    weights = 16 + 16 + 16 + 96 + 64
    assert model_flops(model, tokens=10, sum_squared_lengths=0) == 6 * weights * 10
    # One sequence of 10: 50 query-key pairs, 2 heads, scores and values of 2 channels each.
    assert model_flops(model, tokens=0, sum_squared_lengths=100) == 6 * 50 * 2 * (2 + 2)


def test_qwen3_30b_a3b_activates_about_three_billion_parameters():
    model = ModelConfig(
        num_layers=48,
        hidden_size=2048,
        num_attention_heads=32,
        num_query_groups=4,
        kv_channels=128,
        num_experts=128,
        moe_router_topk=8,
        moe_ffn_hidden_size=768,
        vocab_size=151936,
        seq_length=4096,
    )
    per_token = model_flops(model, tokens=1, sum_squared_lengths=0) / 6
    assert per_token == pytest.approx(3.03e9, rel=0.01)  # 3.3e9 with the input embedding, which multiplies nothing


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H20", 148e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_peaks(name, peak):
    assert peak_flops(name) == peak


def test_mfu():
    assert mfu(989e12, seconds=2.0, gpus=2, device_name="NVIDIA H200") == 0.25
    assert mfu(1.0, seconds=1.0, gpus=1, device_name="cpu") is None
