"""Options of the pretraining script, spelled as Megatron-LM spells them, plus ours. No torch, no megatron."""

from __future__ import annotations

import argparse
import difflib
from typing import NoReturn

from megaring.errors import UserError

CP_SCHEDULERS = ("buddyring", "megatron", "zeppelin", "uniform", "local")
ATTENTION_BACKENDS = ("auto", "fused", "ring", "reference")
OVERLONG = ("error", "truncate", "split")
MOST = 2**31 - 1  # of counts, sizes and seeds: what int32 fields and seeds take


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are ``UserError`` and which suggests the nearest option."""

    def error(self, message: str) -> NoReturn:
        """Raise ``message`` as a ``UserError``."""
        prefix = "unrecognized arguments: "
        if message.startswith(prefix):
            unknown = message.removeprefix(prefix).split(" ")[0]
            message = f"unknown option {unknown or repr(unknown)}{self.nearest(unknown)}"
        raise UserError(message)

    def nearest(self, unknown: str) -> str:
        """`` (did you mean ...?)`` for a misspelt option, or nothing."""
        known = [name.lstrip("-") for name in self._option_string_actions]
        word = unknown.lstrip("-").split("=")[0].replace("_", "-")
        match = difflib.get_close_matches(word, known, n=1)
        return f" (did you mean --{match[0]}?)" if match else "; --help lists them"


def positive(text: str) -> int:
    """An integer of at least 1 and at most ``MOST``."""
    value = non_negative(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return value


def non_negative(text: str) -> int:
    """An integer of at least 0 and at most ``MOST``."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value} is negative")
    if value > MOST:
        raise argparse.ArgumentTypeError(f"{text} is more than {MOST}")
    return value


def number(text: str) -> float:
    """A finite number of at least 0."""
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a finite number of at least 0")
    return value


def above_zero(text: str) -> float:
    """A finite number above 0."""
    value = number(text)
    if value == 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def decay(text: str) -> float:
    """The decay rate of a running mean: at least 0 and below 1."""
    value = number(text)
    if value >= 1:
        raise argparse.ArgumentTypeError(f"{text} is not below 1")
    return value


def _flag(group: argparse._ArgumentGroup, name: str, default: bool, text: str) -> None:
    group.add_argument(name, action=argparse.BooleanOptionalAction, default=default, help=text)


def build_parser() -> Parser:
    """The parser of ``scripts/pretrain_gpt.py``; its defaults are the ones that no recipe and no flag changes."""
    parser = Parser(
        prog="pretrain_gpt.py",
        description="Pretrain a GPT or Qwen3-MoE model on sequences of very different lengths.",
        allow_abbrev=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--recipe", metavar="FILE.yaml", help="defaults in the same names; a flag wins")
    _add_model(parser.add_argument_group("model"))
    _add_parallel(parser.add_argument_group("parallelism"))
    _add_placement(parser.add_argument_group("placement of sequences and attention"))
    _add_data(parser.add_argument_group("data"))
    _add_training(parser.add_argument_group("training"))
    _add_output(parser.add_argument_group("checkpoints and logging"))
    return parser


def _add_model(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--num-layers", type=positive, default=4)
    add("--hidden-size", type=positive, default=128)
    add("--ffn-hidden-size", type=positive, help="default: 4 x hidden size")
    add("--num-attention-heads", type=positive, default=4)
    add("--num-query-groups", type=positive, help="KV heads; default: as many as query heads")
    add("--kv-channels", type=positive, help="head dimension; default: hidden size / heads")
    add("--vocab-size", type=positive, help="default: from the record beside the corpus")
    add("--make-vocab-size-divisible-by", type=positive, default=128)
    add("--norm-epsilon", type=above_zero, default=1e-6)
    add("--rotary-base", type=positive, default=1_000_000)
    add("--init-method-std", type=above_zero, default=0.02)
    _flag(group, "--qk-layernorm", True, "RMSNorm on queries and keys, as Qwen3 has it")
    _flag(group, "--untie-embeddings-and-output-weights", True, "separate output layer")
    add("--num-experts", type=positive, help="default: a dense model")
    add("--moe-router-topk", type=positive, default=2)
    add("--moe-ffn-hidden-size", type=positive, help="default: ffn hidden size")
    add("--moe-aux-loss-coeff", type=number, default=0.0)
    add("--moe-z-loss-coeff", type=number)
    add("--moe-router-load-balancing-type", default="aux_loss")
    add("--moe-token-dispatcher-type", default="alltoall")
    _flag(group, "--moe-grouped-gemm", False, "experts in grouped matrix products in place of a loop")
    add("--attention-dropout", type=number, default=0.0)
    add("--hidden-dropout", type=number, default=0.0)
    add("--window-size", help="sliding window; refused: no backend has it")
    add("--mtp-num-layers", type=non_negative, help="multi-token prediction; refused")


def _add_parallel(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--tensor-model-parallel-size", type=positive, default=1)
    add("--pipeline-model-parallel-size", type=positive, default=1)
    add("--context-parallel-size", type=positive, help="ranks of a domain; default: world size / (TP x PP)")
    add("--expert-model-parallel-size", type=positive, default=1)
    _flag(group, "--sequence-parallel", True, "with tensor parallelism; it cannot be off there")
    _flag(group, "--use-distributed-optimizer", False, "shard the optimizer over data and context ranks")
    _flag(group, "--overlap-grad-reduce", False, "reduce gradients behind the backward pass")
    add("--distributed-timeout-minutes", type=positive, default=10)


def _add_placement(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--cp-scheduler", choices=CP_SCHEDULERS, default="buddyring")
    add("--token-tolerance", type=number, default=0.10)
    add("--attention-tolerance", type=number, default=0.05)
    add("--max-group", type=positive, default=8, help="largest group of ranks for one sequence")
    add(
        "--capacity",
        type=positive,
        help="tokens a rank may hold; default: 1.25 x its share of the budget for buddyring, no limit for the others",
    )
    add("--cp-scheduler-target", type=positive, help="tokens per rank that the megatron scheduler aims at")
    add("--attention-backend", choices=ATTENTION_BACKENDS, default="auto")
    _flag(group, "--deterministic-mode", False, "bit-equal attention gradients from run to run")


def _add_data(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--data-path", metavar="PREFIX", help="training corpus: PREFIX.bin and PREFIX.idx")
    add("--valid-data-path", metavar="PREFIX", help="held-out corpus; default: no evaluation")
    add("--token-budget", type=positive, default=16384, help="tokens of the whole domain per microbatch")
    add("--seq-length", type=positive, default=4096, help="longest sequence, tokens")
    add("--overlong", choices=OVERLONG, default="error", help="what becomes of documents longer than --seq-length")
    add("--num-microbatches", type=positive, default=1, help="microbatches per step and replica of the domain")
    add("--seed", type=non_negative, default=1234)


def _add_training(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--train-iters", type=positive, default=100)
    add("--lr", type=number, default=3e-4)
    add("--min-lr", type=number, default=0.0)
    add("--lr-decay-style", choices=("cosine", "linear", "constant"), default="cosine")
    add("--lr-warmup-iters", type=non_negative, default=0)
    add("--lr-decay-iters", type=positive, help="default: --train-iters")
    add("--weight-decay", type=number, default=0.1)
    add("--adam-beta1", type=decay, default=0.9)
    add("--adam-beta2", type=decay, default=0.95)
    add("--adam-eps", type=above_zero, default=1e-8)
    add("--clip-grad", type=number, default=1.0)
    _flag(group, "--bf16", False, "bf16 weights and activations, fp32 gradients and optimizer (GPU only)")
    add("--recompute-granularity", choices=("full",), help="recompute whole layers in the backward pass")
    add("--recompute-method", choices=("uniform", "block"), default="uniform")
    add("--recompute-num-layers", type=positive, default=1)
    add("--eval-interval", type=positive, default=20)
    add("--eval-iters", type=positive, default=4, help="microbatches per evaluation and replica")


def _add_output(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--output-dir", default="runs/pretrain", help="metrics.jsonl, placement.png and, by default, checkpoints")
    add("--save", metavar="DIR", help="checkpoints; default: OUTPUT_DIR/checkpoints")
    add("--load", metavar="DIR", help="resume from the newest whole checkpoint in DIR; default: --save, if it has one")
    add("--save-interval", type=positive, help="steps between checkpoints")
    _flag(group, "--save-last", True, "a checkpoint after the last step")
    add("--keep-checkpoints", type=positive, default=2, help="whole checkpoints to keep")
    _flag(group, "--finetune", False, "load weights only: no optimizer, step count or data position")
    add("--log-interval", type=positive, default=1)
    add("--wandb-project", help="log to Weights & Biases as well")
    add("--wandb-exp-name")
    add("--wandb-mode", choices=("online", "offline"), default="offline")
