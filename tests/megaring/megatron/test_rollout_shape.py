"""Shapes of the rollout's planner, taken from Megatron's own configurations."""

from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from megaring.rollout.shape import MlaShape, ModelShape

COMMON = {"num_layers": 3, "hidden_size": 256, "num_attention_heads": 8, "add_bias_linear": False}


def test_gqa():
    shape = ModelShape.from_config(TransformerConfig(**COMMON, num_query_groups=2, kv_channels=64))
    assert (shape.layers, shape.query_heads, shape.kv_heads, shape.head_dim, shape.qkv_bias) == (3, 8, 2, 64, False)
    assert (shape.weight_bytes, shape.mla) == (4, None)  # params_dtype is fp32 there


def test_mla():
    widths = {"kv_lora_rank": 64, "qk_head_dim": 32, "qk_pos_emb_head_dim": 16, "v_head_dim": 24}
    shape = ModelShape.from_config(MLATransformerConfig(**COMMON, q_lora_rank=None, **widths))
    assert shape.mla == MlaShape(None, 64, 32, 16, 24)
    assert shape.cache_heads == 1
