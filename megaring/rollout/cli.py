"""``megaring rollout ...``: its subcommands. What they need is imported when they run."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from megaring.errors import UserError
from megaring.options import above_zero, non_negative, number, positive
from megaring.rollout.commands import (
    GENERATE,
    GENERATE_EXAMPLES,
    SERVE,
    SERVE_EXAMPLES,
    add_generate_arguments,
    add_serve_arguments,
)

DESCRIPTION = "Generate with a model whose attention layout changes while requests run."
_PLAN = """\
Compare the four attention layouts of a model on a group of GPUs: what each takes of a rank's memory, the longest
context and the number of requests it has room for, the predicted time of a step, and what a switch between any two
would move and cost. Needs no GPU.
"""
_EXAMPLES = """\
examples:
  megaring rollout plan --model deepseek-v2-lite --ranks 2 --batch 16 --context 32768
  megaring rollout plan --model deepseek-v3 --precision fp8 --ranks 8 --batch 64 --context 131072
  megaring rollout plan --recipe recipes/qwen3_30b_a3b.yaml --ranks 4 --chunk 8192 --json
"""
MODELS = ("deepseek-v2-lite", "deepseek-v3", "qwen3-30b-a3b")
GPU_NAMES = ("H100", "H200", "B200")
BYTES = {"fp32": 4, "bf16": 2, "fp8": 1}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The subcommands of ``megaring rollout``; each sets ``run``."""
    commands = parser.add_subparsers(required=True, metavar="{plan,generate,serve}")
    plan = commands.add_parser(
        "plan",
        help="memory, step time and switches of every layout, for a model and a group of GPUs",
        description=_PLAN,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_plan_arguments(plan)
    plan.set_defaults(run=run_plan)
    generate = commands.add_parser(
        "generate",
        help="generate for a batch of prompts, and show layouts and speed",
        description=GENERATE,
        epilog=GENERATE_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_generate_arguments(generate)
    serve = commands.add_parser(
        "serve",
        help="an OpenAI-style completions server on localhost",
        description=SERVE,
        epilog=SERVE_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_serve_arguments(serve)


def _add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    model = parser.add_argument_group("model").add_mutually_exclusive_group(required=True)
    model.add_argument("--model", choices=MODELS, type=str.lower, help="a built-in shape")
    model.add_argument("--recipe", type=Path, metavar="FILE.yaml", help="Megatron option names, as in recipes/")
    group = parser.add_argument_group("changes to the model")
    group.add_argument("--num-layers", type=positive, metavar="N", help="keep only so many layers")
    group.add_argument("--precision", choices=BYTES, help="of the weights; default: bf16, or what the recipe says")
    group.add_argument("--kv-precision", choices=BYTES, help="of the KV cache; default: that of the weights")
    group = parser.add_argument_group("GPUs")
    group.add_argument("--ranks", type=positive, default=8, metavar="T", help="GPUs of the group; default: 8")
    group.add_argument("--gpu", choices=GPU_NAMES, type=str.upper, default="H200", help="default: H200")
    group.add_argument("--gpu-memory", type=above_zero, metavar="GIB", help="default: that of --gpu")
    group.add_argument("--memory-fraction", type=above_zero, default=0.9, metavar="X", help="usable; default: 0.9")
    group.add_argument("--reserve", type=number, default=2.0, metavar="GIB", help="kept free a rank; default: 2")
    group.add_argument("--calibration", type=Path, metavar="FILE", help="measured rates in place of nominal ones")
    group.add_argument("--machine", metavar="NAME", help="which entry of --calibration; default: its only one")
    group = parser.add_argument_group("requests")
    group.add_argument("--batch", type=positive, default=16, metavar="B", help="running requests; default: 16")
    group.add_argument("--context", type=positive, default=32768, metavar="N", help="tokens of each; default: 32768")
    group.add_argument("--chunk", type=non_negative, default=0, metavar="N", help="one request prefills so many tokens")
    group = parser.add_argument_group("output")
    group.add_argument("--rates", action="store_true", help="show the rates that times are predicted from")
    group.add_argument("--json", action="store_true", help="print one JSON object, in bytes and seconds")


def run_plan(options: argparse.Namespace) -> int:
    """Make the plan and print it. Raises UserError for what cannot be planned."""
    from megaring.rollout.gpus import GPUS
    from megaring.rollout.plan_report import report_lines, to_json
    from megaring.rollout.planning import GIB, Question, make_plan

    if options.memory_fraction > 1:
        raise UserError(f"--memory-fraction is {options.memory_fraction:g}; it is at most 1")
    if options.machine and not options.calibration:
        raise UserError("--machine goes with --calibration: it names an entry of that file")
    gpu = GPUS[options.gpu]
    memory = options.gpu_memory or gpu.memory_gib
    question = Question(
        shape=_shape(options),
        ranks=options.ranks,
        requests=options.batch,
        context=options.context,
        usable=int(memory * options.memory_fraction * GIB),
        reserve=int(options.reserve * GIB),
        calibration=_calibration(options) if options.calibration else gpu.nominal(),
        chunk=options.chunk,
    )
    plan = make_plan(question)
    print(to_json(plan) if options.json else "\n".join(report_lines(plan, options.rates)))
    return 0


def _shape(options: argparse.Namespace):
    from megaring.rollout.recipes import SHAPES, read_recipe

    shape = SHAPES[options.model] if options.model else read_recipe(options.recipe)
    if options.num_layers:
        if options.num_layers > shape.layers:
            raise UserError(f"--num-layers {options.num_layers}: {shape.name} has {shape.layers}; it can only be cut")
        shape = shape.cut(options.num_layers)
    weights = BYTES.get(options.precision, shape.weight_bytes)
    kv = BYTES[options.kv_precision] if options.kv_precision else weights
    return replace(shape, weight_bytes=weights, kv_bytes=kv)


def _calibration(options: argparse.Namespace):
    from megaring.rollout.calibration import load_all

    path = options.calibration
    if not path.exists():
        raise UserError(f"--calibration {path}: there is no such file; leave it out for nominal rates")
    machines = load_all(path)
    name = options.machine or (next(iter(machines)) if len(machines) == 1 else None)
    if name not in machines:
        known = ", ".join(map(repr, machines)) or "none"
        raise UserError(f"--machine: {path} has {known}" + (f", not {name!r}" if name else "; name one of them"))
    return machines[name]
