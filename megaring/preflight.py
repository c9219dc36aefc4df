"""Everything about a run that can be refused before torch is imported, and what follows from the options.

Every rank makes the same checks on the same inputs, so all of them stop together.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaring.data.documents import Sequences, check_plannable, make_sequences
from megaring.data.indexed import IndexedCorpus
from megaring.data.record import CorpusRecord, check_vocabulary, read_record
from megaring.errors import UserError
from megaring.megatron.checks import check_settings
from megaring.megatron.config import ModelConfig, ParallelConfig, TrainConfig

CAPACITY_SLACK = 1.25  # of a rank's share of the token budget


@dataclass(frozen=True, eq=False)
class Run:
    """A checked run. train, valid: sequences to draw from (valid may be None). plan_options: keywords of ``plan``."""

    options: argparse.Namespace
    model: ModelConfig
    parallel: ParallelConfig
    training: TrainConfig
    world_size: int
    train: Sequences
    valid: Sequences | None
    plan_options: dict[str, Any]

    @property
    def domain(self) -> int:
        """Ranks of the domain that shares a microbatch."""
        return self.parallel.context_parallel_size

    @property
    def replicas(self) -> int:
        """Replicas of the domain."""
        return self.parallel.data_parallel_size(self.world_size)

    @property
    def output_dir(self) -> Path:
        """Where metrics and pictures go."""
        return Path(self.options.output_dir)

    @property
    def save_dir(self) -> Path:
        """Where checkpoints go."""
        return Path(self.options.save or self.output_dir / "checkpoints")


def preflight(options: argparse.Namespace, world_size: int) -> Run:
    """Check ``options`` for a launch of ``world_size`` processes. Raises UserError, which names thing and remedy."""
    if options.data_path is None:
        raise UserError("--data-path is missing: the PREFIX of a corpus that scripts/prepare_corpus.py has written")
    if options.attention_backend == "fused" and not options.bf16:
        raise UserError("--attention-backend fused trains in bf16 only: give --bf16 too, or use auto or ring")
    _check_outputs(options)
    if options.context_parallel_size is None:
        others = options.tensor_model_parallel_size * options.pipeline_model_parallel_size
        options.context_parallel_size = max(1, world_size // others)
    parallel = ParallelConfig.from_options(options)
    if options.seq_length > options.token_budget:
        raise UserError(
            f"--seq-length {options.seq_length} exceeds --token-budget {options.token_budget}, the tokens of a "
            "microbatch: raise --token-budget or lower --seq-length (see --overlong)"
        )
    train, record = _open(options.data_path, options)
    if options.vocab_size is None:
        if record is None:
            raise UserError(
                f"{options.data_path} has no record of its vocabulary beside it; give --vocab-size, or make the "
                "corpus with scripts/prepare_corpus.py, which writes one"
            )
        options.vocab_size = record.vocab_size
    valid, valid_record = (None, None) if options.valid_data_path is None else _open(options.valid_data_path, options)
    model, training = ModelConfig.from_options(options), TrainConfig.from_options(options)
    check_settings(model, parallel, training, world_size)
    for sequences, its_record in ((train, record), (valid, valid_record)):
        if sequences is not None:
            check_vocabulary(sequences.corpus, its_record, options.vocab_size)
    plan_options = _plan_options(options, parallel)
    for sequences in (train, valid):
        if sequences is not None:
            _check_plannable(sequences, parallel.context_parallel_size, plan_options)
    return Run(options, model, parallel, training, world_size, train, valid, plan_options)


def _check_outputs(options: argparse.Namespace) -> None:
    """Refuse folders that cannot be written to."""
    for name in ("output_dir", "save"):
        value = getattr(options, name)
        if value is None:
            continue
        flag = f"--{name.replace('_', '-')}"
        if not value:
            raise UserError(f"{flag} is empty; name a folder")
        # The nearest thing that exists: folders below it will be made.
        path = Path(value).absolute()
        there = next(p for p in (path, *path.parents) if os.path.lexists(p))
        if not there.is_dir():
            raise UserError(f"{flag} {value}: {there} is not a folder; name another one")
        if not os.access(there, os.W_OK | os.X_OK):
            raise UserError(f"{flag} {value}: {there} cannot be written to; name another folder")


def _open(prefix: str, options: argparse.Namespace) -> tuple[Sequences, CorpusRecord | None]:
    corpus = IndexedCorpus(prefix)
    return make_sequences(corpus, options.seq_length, options.overlong), read_record(corpus)


def _plan_options(options: argparse.Namespace, parallel: ParallelConfig) -> dict[str, Any]:
    ranks = parallel.context_parallel_size
    capacity = options.capacity
    if capacity is None and options.cp_scheduler == "buddyring":
        capacity = _round_up(int(CAPACITY_SLACK * options.token_budget / ranks), parallel.rank_multiple)
    if options.cp_scheduler == "megatron" and ranks > 2:
        raise UserError(
            f"--cp-scheduler megatron can place a sequence across the halves of a domain of {ranks} ranks, which no "
            "attention backend runs: train with it on at most 2 ranks, or compare it with 'buddyring compare'"
        )
    return {
        "scheduler": options.cp_scheduler,
        "token_tolerance": options.token_tolerance,
        "attention_tolerance": options.attention_tolerance,
        "max_group": options.max_group,
        "capacity": capacity,
        "rank_multiple": parallel.rank_multiple,
        "target": options.cp_scheduler_target,
    }


def _check_plannable(sequences: Sequences, ranks: int, plan_options: dict[str, Any]) -> None:
    try:
        check_plannable(sequences, ranks, plan_options)
    except UserError:
        raise
    except ValueError as error:  # an option that the planner refuses by name
        raise UserError(str(error)) from None


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
