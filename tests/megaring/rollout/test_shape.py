"""Sizes of projections and caches, and shapes taken from Megatron's configurations."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from rollout_shapes import NO_ORACLE, ORACLE, QWEN3, V2_LITE, V3

from megaring.rollout.layout import LAYOUTS, layout_named
from megaring.rollout.shape import MlaShape, ModelShape

MIB = 2**20


@pytest.mark.skipif(ORACLE is None, reason=NO_ORACLE)
def test_projections_of_deepseek_v3():
    oracle = ORACLE["deepseek_v3_projection_mib_bf16"]
    sizes = {each.name: each.elements * 2 / MIB for each in V3.projections}
    assert sizes == {"linear_q_up_proj": oracle["q_b"], "linear_kv_up_proj": oracle["kv_b"], "linear_proj": oracle["o"]}
    assert V3.layer_projection_bytes == oracle["layer"] * MIB


def test_cache_of_a_token():
    assert V3.layer_token_bytes == 2 * (512 + 64)
    assert V3.token_bytes == 61 * 1152
    assert QWEN3.layer_token_bytes == 2 * 2 * 4 * 128
    assert replace(V3, kv_bytes=1).token_bytes * 2 == V3.token_bytes
    assert (V3.query_width, V3.result_width) == (576, 512)
    assert (QWEN3.query_width, QWEN3.result_width) == (128, 128)


def test_down_projections_count_where_they_are_cut():
    local = replace(V3, shard_down=True)
    extra = (1536 + 512 + 64) * 7168
    assert local.layer_projection_bytes - V3.layer_projection_bytes == 2 * extra
    assert (V3.replicated_elements, local.replicated_elements, QWEN3.replicated_elements) == (extra, 0, 0)
    assert [each.name for each in V2_LITE.projections] == ["linear_q_proj", "linear_kv_up_proj", "linear_proj"]
    assert V2_LITE.replicated_elements == 576 * 2048


def test_heads_of_every_rank():
    assert [list(QWEN3.rank_heads(rank, 2)) for rank in range(2)] == [[0, 1], [2, 3]]
    assert [list(QWEN3.rank_heads(rank, 8)) for rank in range(8)] == [[0], [0], [1], [1], [2], [2], [3], [3]]
    assert [list(V3.rank_heads(rank, 8)) for rank in range(8)] == [[0]] * 8


@pytest.mark.parametrize(
    ("shape", "ranks", "said"),
    [
        (QWEN3, 3, "32 query heads do not divide over 3 ranks; these do: 1, 2, 4, 8, 16, 32"),
        (replace(QWEN3, query_heads=36, kv_heads=9), 4, "4 ranks neither divide the 9 KV heads nor"),
        (V2_LITE, 32, "16 query heads do not divide over 32 ranks"),
        (QWEN3, 0, "at least 1"),
    ],
)
def test_ranks_that_heads_do_not_divide_over(shape, ranks, said):
    with pytest.raises(ValueError, match=said):
        shape.check_ranks(ranks)


def test_sizes_that_cannot_be():
    with pytest.raises(ValueError, match="32 query heads do not divide by 5 KV heads"):
        replace(QWEN3, kv_heads=5)
    with pytest.raises(ValueError, match="layers is 0"):
        replace(QWEN3, layers=0)


def config(**fields):
    basic = {"num_layers": 4, "hidden_size": 256, "num_attention_heads": 8, "num_query_groups": 2, "kv_channels": 32}
    return SimpleNamespace(**{**basic, **fields})


def test_gqa_from_a_config():
    shape = ModelShape.from_config(config(), name="small")
    assert (shape.layers, shape.hidden, shape.query_heads, shape.kv_heads, shape.head_dim) == (4, 256, 8, 2, 32)
    assert (shape.mla, shape.weight_bytes, shape.kv_bytes) == (None, 2, 2)
    plain = ModelShape.from_config(config(num_query_groups=None, kv_channels=None))
    assert (plain.kv_heads, plain.head_dim) == (8, 32)
    biased = ModelShape.from_config(config(add_qkv_bias=True))
    assert biased.layer_projection_bytes - shape.layer_projection_bytes == 2 * (8 + 2 * 2) * 32


def test_mla_from_a_config():
    mla = {"kv_lora_rank": 64, "qk_head_dim": 32, "qk_pos_emb_head_dim": 16, "v_head_dim": 32, "q_lora_rank": None}
    double = SimpleNamespace(itemsize=8)
    shape = ModelShape.from_config(
        config(multi_latent_attention=True, params_dtype=double, **mla), shard_down=True, kv_bytes=4
    )
    assert shape.mla == MlaShape(None, 64, 32, 16, 32)
    assert (shape.weight_bytes, shape.kv_bytes, shape.shard_down) == (8, 4, True)
    del mla["v_head_dim"]
    with pytest.raises(ValueError, match="v_head_dim is None"):
        ModelShape.from_config(config(multi_latent_attention=True, **mla))


def test_layouts_by_name():
    assert [str(layout_named(name)) for name in LAYOUTS] == ["TP", "DP", "CP", "DOP"]
    with pytest.raises(ValueError, match="no layout is called 'EP'; choose from TP, DP, CP, DOP"):
        layout_named("EP")
