"""Options that would do nothing are refused by name, wherever they were given."""

import subprocess
import sys

import pytest

from megaring.errors import UserError
from megaring.idle import RULES
from megaring.options import build_parser
from megaring.recipe import parse

EXPERTS = ("--num-experts", "4", "--moe-aux-loss-coeff", "0.01")
CASES = [
    # what is refused, the option that the message tells to give or change, and what makes it say something
    (("--moe-router-topk", "2"), "--num-experts", EXPERTS),
    (("--moe-ffn-hidden-size", "64"), "--num-experts", EXPERTS),
    (("--moe-aux-loss-coeff", "0.01"), "--num-experts", ("--num-experts", "4")),
    (("--moe-z-loss-coeff", "0.01"), "--num-experts", EXPERTS),
    (("--moe-router-load-balancing-type", "aux_loss"), "--num-experts", EXPERTS),
    (("--moe-token-dispatcher-type", "alltoall"), "--num-experts", EXPERTS),
    (("--moe-grouped-gemm",), "--num-experts", EXPERTS),
    (("--recompute-method", "uniform"), "--recompute-granularity", ("--recompute-granularity", "full")),
    (("--recompute-num-layers", "1"), "--recompute-granularity", ("--recompute-granularity", "full")),
    (("--sequence-parallel",), "--tensor-model-parallel-size", ("--tensor-model-parallel-size", "2")),
    (("--cp-scheduler-target", "9"), "--cp-scheduler megatron", ("--cp-scheduler", "megatron")),
    (("--eval-interval", "5"), "--valid-data-path", ("--valid-data-path", "x")),
    (("--eval-iters", "5"), "--valid-data-path", ("--valid-data-path", "x")),
    (("--finetune",), "--load", ("--load", "x")),
    (("--wandb-exp-name", "x"), "--wandb-project", ("--wandb-project", "x")),
    (("--wandb-mode", "online"), "--wandb-project", ("--wandb-project", "x")),
]
BESIDE = [
    # options that make another do nothing, that other one, and options beside which it does something
    ((*EXPERTS, "--moe-ffn-hidden-size", "64"), ("--ffn-hidden-size", "64"), EXPERTS),
    (("--num-experts", "4", "--moe-router-load-balancing-type", "none"), ("--moe-aux-loss-coeff", "0.01"), EXPERTS),
    (("--num-experts", "4"), ("--moe-router-load-balancing-type", "aux_loss"), EXPERTS),
    (("--cp-scheduler", "uniform"), ("--token-tolerance", "0.2"), ()),
    (("--cp-scheduler", "local"), ("--attention-tolerance", "0.0"), ()),
    (("--cp-scheduler", "zeppelin"), ("--max-group", "4"), ()),
    (("--lr-decay-style", "constant"), ("--min-lr", "1e-5"), ("--lr-decay-style", "linear")),
    (("--lr-decay-style", "constant"), ("--lr-decay-iters", "50"), ()),
    (("--no-save-last",), ("--keep-checkpoints", "3"), ("--no-save-last", "--save-interval", "2")),
]


def refused(argv, name):
    with pytest.raises(UserError, match=rf"^{name} has no effect ") as caught:
        parse(argv)
    return str(caught.value)


def as_recipe(tmp_path, *argv):
    """A recipe of the same settings, by its path."""
    lines, at = [], 0
    while at < len(argv):
        value = argv[at + 1] if at + 1 < len(argv) and not argv[at + 1].startswith("--") else None
        name = argv[at].removeprefix("--")
        off = value is None and name.startswith("no-")
        lines.append(f"{name.removeprefix('no-') if off else name}: {value or str(not off).lower()}\n")
        at += 1 + (value is not None)
    path = tmp_path / "recipe.yaml"
    path.write_text("".join(lines))
    return str(path)


@pytest.mark.parametrize(("given", "remedy", "decider"), CASES, ids=lambda case: case[0])
def test_an_option_without_the_one_that_it_belongs_to(given, remedy, decider):
    assert remedy in refused(given, given[0])
    parse([*given, *decider])


@pytest.mark.parametrize(("others", "given", "fit"), BESIDE, ids=lambda case: case[0] if case else "alone")
def test_an_option_beside_one_that_switches_it_off(others, given, fit, tmp_path):
    refused([*others, *given], given[0])
    parse(others)
    parse([*fit, *given])
    # In a recipe it is refused all the same, but a flag may overrule a recipe.
    refused(["--recipe", as_recipe(tmp_path, *others, *given)], given[0])


def test_a_flag_may_overrule_a_recipe(tmp_path):
    recipe = as_recipe(tmp_path, "--min-lr", "1e-5", "--max-group", "4", "--keep-checkpoints", "3")
    argv = ["--recipe", recipe, "--lr-decay-style", "constant", "--cp-scheduler", "uniform", "--no-save-last"]
    assert parse(argv).max_group == 4
    refused([*argv, "--max-group", "4"], "--max-group")


def test_a_recipe_may_set_what_a_launch_switches_on(tmp_path):
    settings = ("--eval-iters", "5", "--wandb-mode", "online")
    assert parse(["--recipe", as_recipe(tmp_path, *settings)]).eval_iters == 5
    refused(["--recipe", as_recipe(tmp_path, "--moe-router-topk", "2")], "--moe-router-topk")


def test_what_is_switched_off_asks_for_nothing():
    parse(["--no-moe-grouped-gemm", "--no-sequence-parallel", "--no-finetune"])


def test_every_rule_is_about_options_that_exist_and_has_a_case():
    names = {action.dest for action in build_parser()._actions}
    ruled = [name for rule in RULES for name in rule.options]
    assert {*ruled, *(name for rule in RULES for name in rule.deciders)} <= names
    cases = [given for given, _, _ in CASES] + [given for _, given, _ in BESIDE]
    assert sorted(given[0].removeprefix("--").replace("-", "_") for given in cases) == sorted(ruled)


def test_neither_torch_nor_megatron_is_imported():
    code = (
        "import sys\nfrom megaring.recipe import parse\n"
        "try: parse(['--recompute-method', 'block'])\n"
        "except Exception as error: print(error, {'torch', 'megatron'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("--recompute-method has no effect without --recompute-granularity: give")
    assert done.stdout.rstrip().endswith("set()")
