"""Tiny models in the processes of the pool: the same data under different layouts, and what comes out of each."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from buddyring import Placement
from megaring.data.microbatch import Microbatch, build_microbatch
from megaring.megatron import parallel
from megaring.megatron.config import ModelConfig, ParallelConfig, TrainConfig
from megaring.megatron.loss import unwrap
from megaring.megatron.model import build_model
from megaring.megatron.parameters import Place, placed_parameters
from megaring.megatron.step import EvalReport, EvalStep, StepReport, TrainStep

VOCABULARY = 128
MODEL = ModelConfig(
    num_layers=2,
    hidden_size=48,
    num_attention_heads=4,
    num_query_groups=2,
    kv_channels=16,
    vocab_size=VOCABULARY,
    seq_length=1024,
    ffn_hidden_size=64,
    num_experts=4,
    moe_ffn_hidden_size=32,
    moe_aux_loss_coeff=0.1,
    moe_z_loss_coeff=0.01,
    init_method_std=0.1,
)
TRAIN = TrainConfig(train_iters=100, lr=3e-3)
ONE_PROCESS = ParallelConfig(attention_backend="reference")


@dataclass(frozen=True)
class Batch:
    """One microbatch: sequence lengths, and per size of the domain the group of each sequence.

    targets: per sequence the positions that are to be predicted, or None for all of them. seed: of the tokens.
    """

    lengths: tuple[int, ...]
    groups: dict[int, tuple[tuple[int, int], ...]]
    seed: int = 0
    targets: tuple[tuple[int, ...], ...] | None = None
    edits: tuple[tuple[int, int, int], ...] = ()  # (sequence, position, token)
    tile: int = 128

    def sequences(self) -> list[np.ndarray]:
        generator = np.random.default_rng(self.seed)
        made = [generator.integers(0, VOCABULARY, length) for length in self.lengths]
        for sequence, position, token in self.edits:
            made[sequence][position] = token
        return made

    def microbatch(self, layout: ParallelConfig, rank: int) -> Microbatch:
        ranks = layout.context_parallel_size
        groups = ((0, 1),) * len(self.lengths) if ranks == 1 else self.groups[ranks]
        placement = Placement.from_groups(
            self.lengths, ranks, groups, rank_multiple=layout.rank_multiple, tile=self.tile
        )
        targets = None
        if self.targets is not None:
            targets = [np.isin(np.arange(n), t) for n, t in zip(self.lengths, self.targets, strict=True)]
        return build_microbatch(placement, rank, self.sequences(), targets=targets)


@dataclass(frozen=True)
class Case:
    """What to run: ``replicas[d]`` are the microbatches of data-parallel replica ``d``."""

    replicas: tuple[tuple[Batch, ...], ...]
    layout: ParallelConfig = ONE_PROCESS
    model: ModelConfig = MODEL
    steps: int = 0
    train: TrainConfig = TRAIN

    def on_one_process(self) -> Case:
        """The same microbatches, of all replicas one after the other, on one process with nothing switched on."""
        return Case(
            (tuple(batch for replica in self.replicas for batch in replica),),
            model=replace(self.model, recompute_granularity=None, moe_grouped_gemm=False),
            steps=self.steps,
            train=self.train,
        )


@dataclass(frozen=True)
class Outcome:
    """What one rank saw. gradients: of the initial weights, by place. reports: of the steps that followed."""

    gradients: list[tuple[Place, np.ndarray]] = field(default_factory=list)
    gradient_losses: float = 0.0
    reports: list[StepReport] = field(default_factory=list)
    evaluation: EvalReport | None = None
    rows: int = 0


def prepare(rank: int, world_size: int, case: Case) -> tuple[TrainStep, list[Microbatch]]:
    """A train step, and this rank's microbatches."""
    logging.disable(logging.INFO)
    parallel.start(case.layout, seed=case.train.seed)
    from megatron.core import parallel_state

    replica = case.replicas[parallel_state.get_data_parallel_rank()]
    here = parallel_state.get_context_parallel_rank()
    train = replace(case.train, num_microbatches=len(replica))
    chunks = build_model(case.model, case.layout, seed=train.seed)
    step = TrainStep(chunks, case.model, case.layout, train)
    return step, [batch.microbatch(case.layout, here) for batch in replica]


def run(rank: int, world_size: int, case: Case) -> Outcome:
    """The gradient, an evaluation and then ``case.steps`` steps; for ``pool.run``."""
    step, batches = prepare(rank, world_size, case)
    losses = step.gradients(batches, force_all_reduce=True)
    gradients = gradients_of(step)
    evaluation = EvalStep(step)(batches)
    reports = [step(batches) for _ in range(case.steps)]
    parallel.stop()
    return Outcome(gradients, float(sum(losses)) if losses else 0.0, reports, evaluation, batches[0].shards.rows)


def gradients_of(step: TrainStep) -> list[tuple[Place, np.ndarray]]:
    """This rank's gradients."""
    placed = [pair for chunk in step.chunks for pair in placed_parameters(unwrap(chunk))]
    return [(place, parameter.main_grad.detach().float().numpy().copy()) for place, parameter in placed]


def assemble(outcomes: Sequence[Outcome], tolerance: float = 1e-6) -> dict[str, np.ndarray]:
    """Whole gradients by name. Asserts that every part is held by a rank, and that ranks agree on what they share."""
    whole: dict[str, torch.Tensor] = {}
    for outcome in outcomes:
        for place, part in outcome.gradients:
            held = whole.setdefault(place.name, torch.full(place.shape, float("nan")))
            assert tuple(held.shape) == place.shape, place.name
            before, now = place.cut(held), torch.from_numpy(part)
            assert before.shape == now.shape, place.name
            if not before.isnan().all():
                assert torch.allclose(before, now, rtol=tolerance, atol=tolerance * float(now.abs().max())), place.name
            place.paste(held, now)
    for name, gradient in whole.items():
        assert not gradient.isnan().any(), f"{name}: no rank holds all of it"
    return {name: gradient.numpy() for name, gradient in whole.items()}


def worst_difference(
    found: dict[str, np.ndarray], expected: dict[str, np.ndarray], *, idle_experts: bool = False
) -> tuple[float, str]:
    """The largest error of any parameter's gradient, relative to that gradient's largest entry, and its name.

    idle_experts: whether an expert may have no gradient at all; any other parameter without one proves nothing.
    """
    assert found.keys() == expected.keys()
    errors = {}
    for name, reference in expected.items():
        scale = float(np.abs(reference).max())
        assert scale > 0 or (idle_experts and ".experts." in name), f"{name} has no gradient"
        errors[name] = float(np.abs(found[name] - reference).max()) / (scale or 1.0)
    worst = max(errors, key=errors.get)
    return errors[worst], worst
