"""Built-in shapes against the sizes that their makers state, and shapes from YAML."""

from pathlib import Path

import pytest

from megaring.errors import UserError
from megaring.rollout.cli import GPU_NAMES, MODELS
from megaring.rollout.gpus import GPUS
from megaring.rollout.planning import common_bytes
from megaring.rollout.recipes import SHAPES, layer_frequency, read_recipe
from megaring.rollout.shape import MlaShape

RECIPES = sorted((Path(__file__).parents[3] / "recipes").glob("*.yaml"))


@pytest.mark.parametrize(
    ("name", "billions", "active"),
    [("deepseek-v2-lite", 15.7, 2.4), ("deepseek-v3", 671, 37), ("qwen3-30b-a3b", 30.5, 3.3)],
)
def test_parameter_counts_are_those_that_are_published(name, billions, active):
    shape = SHAPES[name]
    attention = shape.layers * (sum(each.elements for each in shape.projections) + shape.replicated_elements)
    rest = shape.feed_forward
    stored = attention + rest.stored(shape.hidden, shape.layers)
    visited = attention + rest.visited(shape.hidden, shape.layers) + rest.vocab * shape.hidden  # with the embedding
    assert stored / 1e9 == pytest.approx(billions, rel=0.003)
    assert visited / 1e9 == pytest.approx(active, rel=0.11)  # makers differ in whether embeddings are active
    assert common_bytes(shape, 1) + shape.projection_bytes == 2 * stored


def test_the_command_offers_what_there_is():
    assert set(MODELS) == set(SHAPES)
    assert set(GPU_NAMES) == set(GPUS)
    assert "not measured" in GPUS["H200"].nominal().lines()[0]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipes_of_the_project_have_shapes(path):
    shape = read_recipe(path)
    assert shape.name == path.stem
    assert shape.mla is not None or shape.query_heads % shape.kv_heads == 0


def test_the_recipe_of_qwen3_is_the_built_in_shape():
    shape, built_in = read_recipe(RECIPES[0].parent / "qwen3_30b_a3b.yaml"), SHAPES["qwen3-30b-a3b"]
    assert shape.projection_bytes == built_in.projection_bytes
    assert shape.token_bytes == built_in.token_bytes
    assert common_bytes(shape, 4) == common_bytes(built_in, 4)
    tiny = read_recipe(RECIPES[0].parent / "tiny_cpu.yaml")  # trained in fp32
    assert (tiny.weight_bytes, tiny.kv_bytes) == (4, 4)


def test_mla_recipes(tmp_path):
    path = tmp_path / "v2_lite.yaml"
    path.write_text(
        "num-layers: 27\nhidden-size: 2048\nffn-hidden-size: 10944\nnum-attention-heads: 16\nvocab-size: 102400\n"
        "multi-latent-attention: true\nkv-lora-rank: 512\nqk-head-dim: 128\nqk-pos-emb-head-dim: 64\nv-head-dim: 128\n"
        "num-experts: 64\nmoe-router-topk: 6\nmoe-ffn-hidden-size: 1408\nmoe-shared-expert-intermediate-size: 2816\n"
        "moe-layer-freq: ([0]*1+[1]*26)\nbf16: true\n"
    )
    shape, built_in = read_recipe(path), SHAPES["deepseek-v2-lite"]
    assert shape.mla == MlaShape(None, 512, 128, 64, 128)
    assert shape.feed_forward == built_in.feed_forward
    assert shape.projections == built_in.projections
    path.write_text("num-layers: 2\nmulti-latent-attention: true\nkv-lora-rank: 512\n")
    with pytest.raises(UserError, match="qk_head_dim is None"):
        read_recipe(path)
    path.write_text("num-layers: 2\nkv-lora-ranks: 512\n")
    with pytest.raises(UserError, match=r"did you mean --kv-lora-rank\?"):
        read_recipe(path)
    path.write_text("num-layers: 2\nmoe-layer-freq: often\n")
    with pytest.raises(UserError, match="neither a number nor a pattern"):
        read_recipe(path)
    path.write_text("num-layers: 2\nnum-experts: 2\nmoe-layer-freq: '[0,1,1]'\n")
    with pytest.raises(UserError, match="moe_layer_freq has 3 entries for 2 layers"):
        read_recipe(path)


def test_layer_frequencies():
    assert layer_frequency("2") == 2
    assert layer_frequency("([0]*3+[1]*2)") == (0, 0, 0, 1, 1)
    assert layer_frequency("[0,1]*2") == (0, 1, 0, 1)
    for text in ("", "[2]", "[1]*", "__import__('os')", "0"):
        with pytest.raises(Exception, match=r"neither a number|not at least 1"):
            layer_frequency(text)


def test_cutting_layers_keeps_the_first_ones():
    shape = SHAPES["deepseek-v3"].cut(2)
    assert (shape.layers, shape.feed_forward.dense_layers) == (2, 2)
    assert SHAPES["deepseek-v3"].cut(8).feed_forward.dense_layers == 3
