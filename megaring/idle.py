"""Options that would do nothing beside the others are refused by name, so that nobody relies on a dead switch."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection
from dataclasses import dataclass

from megaring.errors import UserError


@dataclass(frozen=True)
class Rule:
    """When options do nothing.

    options: names (underscores) of those that do nothing while ``idle(all options)`` holds. deciders: the options that
    ``idle`` looks at. reason: ends the message ``--option has no effect ...`` and names the remedy. launch: whether the
    deciders belong to a launch, not to a recipe, so that a recipe may well set the options without them.
    """

    options: tuple[str, ...]
    deciders: tuple[str, ...]
    idle: Callable[[argparse.Namespace], bool]
    reason: str
    launch: bool = False


def _without(decider: str, options: tuple[str, ...], *, launch: bool = False) -> Rule:
    """``options`` say more about what ``decider`` switches on."""
    reason = f"without --{decider.replace('_', '-')}: give that as well, or leave it out"
    return Rule(options, (decider,), lambda given: not getattr(given, decider), reason, launch)


RULES = (
    _without(
        "num_experts",
        (
            "moe_router_topk",
            "moe_ffn_hidden_size",
            "moe_aux_loss_coeff",
            "moe_z_loss_coeff",
            "moe_router_load_balancing_type",
            "moe_token_dispatcher_type",
            "moe_grouped_gemm",
        ),
    ),
    Rule(
        ("ffn_hidden_size",),
        ("num_experts", "moe_ffn_hidden_size"),
        lambda given: bool(given.num_experts and given.moe_ffn_hidden_size),
        "beside --num-experts and --moe-ffn-hidden-size: every layer is one of experts; leave it out",
    ),
    Rule(
        ("moe_aux_loss_coeff",),
        ("moe_router_load_balancing_type",),
        lambda given: given.moe_router_load_balancing_type == "none",
        "with --moe-router-load-balancing-type none: leave one of the two out",
    ),
    Rule(
        ("moe_router_load_balancing_type",),
        ("moe_aux_loss_coeff",),
        lambda given: given.moe_router_load_balancing_type == "aux_loss" and not given.moe_aux_loss_coeff,
        "while --moe-aux-loss-coeff is 0: give a coefficient, or leave it out",
    ),
    Rule(
        ("sequence_parallel",),
        ("tensor_model_parallel_size",),
        lambda given: given.tensor_model_parallel_size == 1,
        "without --tensor-model-parallel-size above 1, and is on there by itself: leave it out",
    ),
    Rule(
        ("token_tolerance", "attention_tolerance", "max_group"),
        ("cp_scheduler",),
        lambda given: given.cp_scheduler != "buddyring",
        "on other placements than those of --cp-scheduler buddyring: leave it out",
    ),
    Rule(
        ("cp_scheduler_target",),
        ("cp_scheduler",),
        lambda given: given.cp_scheduler != "megatron",
        "on other placements than those of --cp-scheduler megatron: leave it out",
    ),
    Rule(
        ("min_lr", "lr_decay_iters"),
        ("lr_decay_style",),
        lambda given: given.lr_decay_style == "constant",
        "with --lr-decay-style constant: leave it out, or choose cosine or linear",
    ),
    _without("recompute_granularity", ("recompute_method", "recompute_num_layers")),
    _without("valid_data_path", ("eval_interval", "eval_iters"), launch=True),
    Rule(
        ("keep_checkpoints",),
        ("save_interval", "save_last"),
        lambda given: not (given.save_interval or given.save_last),
        "where no checkpoint is saved: give --save-interval, drop --no-save-last, or leave it out",
    ),
    _without("load", ("finetune",), launch=True),
    _without("wandb_project", ("wandb_exp_name", "wandb_mode"), launch=True),
)


def refuse_idle(options: argparse.Namespace, flags: Collection[str], recipe_keys: Collection[str]) -> None:
    """Raise UserError for the first option that was given and has no effect beside the others.

    flags, recipe_keys: names of the options given on the command line and in the recipe. A switch given as off asks for
    nothing. A recipe holds defaults: its keys may lose their effect by a flag, only not by the recipe itself.
    """
    for rule in RULES:
        if not rule.idle(options):
            continue
        overruled = rule.launch or any(decider in flags for decider in rule.deciders)
        for name in rule.options:
            given = name in flags or (name in recipe_keys and not overruled)
            value = getattr(options, name)
            if given and value is not None and value is not False:
                raise UserError(f"--{name.replace('_', '-')} has no effect {rule.reason}")
