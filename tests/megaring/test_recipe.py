import subprocess
import sys
from pathlib import Path

import pytest

from megaring.errors import UserError
from megaring.recipe import parse

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))


def write(tmp_path, text):
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    return str(path)


def test_a_flag_wins_over_the_recipe_and_the_recipe_over_the_defaults(tmp_path):
    recipe = write(tmp_path, "num-layers: 7\nhidden_size: 96\nlr: 1e-3\nbf16: true\n")
    options = parse(["--recipe", recipe, "--num-layers", "3"])
    assert (options.num_layers, options.hidden_size, options.lr, options.bf16) == (3, 96, 1e-3, True)
    assert options.num_attention_heads == 4
    assert parse(["--recipe", recipe, "--no-bf16"]).bf16 is False


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("num-layer: 3", ["unknown key 'num-layer'", "did you mean --num-layers?"]),
        ("tokenbudget: 3", ["unknown key 'tokenbudget'", "--token-budget"]),
        ("num-layers: many", ["num-layers is 'many'"]),
        ("num-layers: 0", ["num-layers is 0", "not at least 1"]),
        ("num-layers: [1, 2]", ["num-layers is [1, 2]", "one value"]),
        ("num-layers: true", ["num-layers is True", "one value"]),
        ("bf16: 1", ["bf16 is 1", "true or false"]),
        ("cp-scheduler: ring", ["cp-scheduler is 'ring'", "buddyring, megatron"]),
        ("- a\n- b", ["must be a mapping"]),
        ("a: [", ["is not YAML"]),
        ("num-layers: 3\nnum_layers: 4", ["num_layers is given twice"]),
        ("num-layers:", ["num-layers has no value", "leave the key out for 4"]),
        ("num-layers: 99999999999", ["more than 2147483647"]),
        ("lr: 2020-13-45", ["is not YAML", "month"]),
        ("lr: " + "[" * 3000, ["is not YAML"]),
        ("recipe: other.yaml", ["unknown key 'recipe'"]),
    ],
)
def test_a_bad_recipe_is_refused_by_name(tmp_path, text, parts):
    with pytest.raises(UserError) as caught:
        parse(["--recipe", write(tmp_path, text)])
    for part in [*parts, "recipe.yaml"]:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        (["--num-layer", "3"], "did you mean --num-layers?"),
        (["--train-iters", "0"], "not at least 1"),
        (["--lr", "nan"], "not a finite number"),
        (["--norm-epsilon", "nan"], "not a finite number"),
        (["--norm-epsilon", "0"], "not above 0"),
        (["--init-method-std=-1"], "not a finite number"),
        (["--adam-beta2", "1"], "not below 1"),
        (["--seed", "99999999999"], "more than 2147483647"),
        (["--bf16", ""], "unknown option ''"),
        (["--cp-scheduler", "foo"], "buddyring"),
        (["--recipe", "missing.yaml"], "No such file"),
        (["--recipe"], "--recipe needs"),
    ],
)
def test_a_bad_command_line_is_refused_by_name(argv, part):
    with pytest.raises(UserError, match=part):
        parse(argv)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_the_recipes_of_the_project_parse(recipe):
    assert parse(["--recipe", str(recipe)]).cp_scheduler == "buddyring"


def test_the_real_shape_of_qwen3_30b_a3b():
    options = parse(["--recipe", str(next(path for path in RECIPES if path.stem == "qwen3_30b_a3b"))])
    per_layer = 2 * options.hidden_size * options.kv_channels * (options.num_attention_heads + options.num_query_groups)
    per_layer += options.num_experts * 3 * options.hidden_size * options.moe_ffn_hidden_size
    per_layer += options.num_experts * options.hidden_size
    total = options.num_layers * per_layer + 2 * options.vocab_size * options.hidden_size
    assert total == pytest.approx(30.5e9, rel=0.005)


def test_parsing_imports_neither_torch_nor_megatron():
    code = "import sys, megaring.recipe as r; r.parse([]); print({'torch', 'megatron'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "set()"
