"""One optimiser step, and one evaluation, over microbatches that are planned already.

    device = parallel.start(layout, seed=1234)
    step = TrainStep(build_model(model, layout, seed=1234), model, layout, train)
    report = step(microbatches)          # this rank's parts of the step's microbatches
    evaluation = EvalStep(step)(microbatches)

Every rank calls every step with the same number of microbatches, of the same plans over its domain.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module

from megaring.backends import fused
from megaring.data.microbatch import Microbatch
from megaring.megatron.config import ModelConfig, ParallelConfig, TrainConfig
from megaring.megatron.loss import Targets, sum_losses, target_losses, unwrap
from megaring.megatron.parallel import domain_group
from megaring.megatron.params import ShardParams
from megaring.megatron.router import DomainRouter

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepReport:
    """What a step did; the same on every rank.

    loss: sum of the losses of all target tokens of the step over their number, 0 without any. target_tokens, tokens,
    sum_squared_lengths: of all microbatches and replicas of the domain. grad_norm: of the whole gradient before
    clipping; 0 for a skipped step or without clipping. aux_loss, z_loss: means over layers and tokens without their
    coefficients, None where there is no such loss. learning_rate: that of this step. skipped: nothing was supervised,
    so no parameter, optimizer state or schedule moved.
    """

    loss: float
    target_tokens: int
    tokens: int
    sum_squared_lengths: int
    grad_norm: float
    aux_loss: float | None
    z_loss: float | None
    learning_rate: float
    skipped: bool


@dataclass(frozen=True)
class EvalReport:
    """Loss over all target tokens of an evaluation, 0 without any; the same on every rank."""

    loss: float
    target_tokens: int
    tokens: int


class TrainStep:
    """Wraps a built model for data parallelism and mixed precision, with its optimizer and learning-rate schedule.

    ``chunks``: the wrapped model; ``optimizer`` and ``scheduler``: megatron's. A checkpoint saves the state of these.
    """

    def __init__(
        self, chunks: Sequence[GPTModel], model: ModelConfig, parallel: ParallelConfig, train: TrainConfig
    ) -> None:
        self.model, self.parallel, self.train = model, parallel, train
        self.device = next(chunks[0].parameters()).device
        self.chunks = [_wrap(chunk, model, parallel) for chunk in chunks]
        self.optimizer = _optimizer(self.chunks, model, parallel, train)
        self.scheduler = OptimizerParamScheduler(
            self.optimizer,
            init_lr=0.0,
            max_lr=train.lr,
            min_lr=train.min_lr,
            lr_warmup_steps=train.lr_warmup_iters,
            lr_decay_steps=train.lr_decay_iters,
            lr_decay_style=train.lr_decay_style,
            start_wd=train.weight_decay,
            end_wd=train.weight_decay,
            wd_incr_steps=train.lr_decay_iters,
            wd_incr_style="constant",
        )
        self._routers = [m for chunk in self.chunks for m in chunk.modules() if isinstance(m, DomainRouter)]
        config = unwrap(self.chunks[0]).config
        no_sync = [chunk.no_sync for chunk in self.chunks]
        config.no_sync_func = no_sync[0] if len(no_sync) == 1 else no_sync
        config.finalize_model_grads_func = finalize_model_grads
        config.grad_scale_func = self.optimizer.scale_loss

    def __call__(self, microbatches: Sequence[Microbatch]) -> StepReport:
        """Forward and backward over this rank's ``microbatches``, then one update.

        Raises ValueError for another number of microbatches than ``num_microbatches`` and FloatingPointError, on all
        ranks alike, when the loss or the gradient is not finite.
        """
        losses = self.gradients(microbatches)
        loss, targets, tokens, squares, aux, z = self._totals(microbatches, losses)
        learning_rate = self.scheduler.get_lr({})
        grad_norm, skipped = 0.0, targets == 0
        if skipped:
            if dist.get_rank() == 0:
                logger.warning("no token of this step is a target: its loss is 0 and nothing is updated")
        else:
            if self.device.type == "cuda":
                fused.check()  # before gradients of an attention call that had to stop are used
            _require_finite("loss", loss / targets)
            _, norm, _ = self.optimizer.step()
            grad_norm = float(norm or 0.0)
            _require_finite("gradient norm", grad_norm)
            self.scheduler.step(1)
        summed_over = max(tokens, 1) * self.model.num_layers
        has_experts = self.model.num_experts is not None
        balanced = has_experts and self.model.moe_router_load_balancing_type == "aux_loss"
        return StepReport(
            loss=0.0 if skipped else loss / targets,
            target_tokens=int(targets),
            tokens=int(tokens),
            sum_squared_lengths=int(squares),
            grad_norm=grad_norm,
            aux_loss=aux / summed_over if balanced and self.model.moe_aux_loss_coeff else None,
            z_loss=z / summed_over if has_experts and self.model.moe_z_loss_coeff else None,
            learning_rate=learning_rate,
            skipped=skipped,
        )

    def gradients(self, microbatches: Sequence[Microbatch], *, force_all_reduce: bool = False) -> list[torch.Tensor]:
        """Forward and backward only. Leaves the step's gradient, already divided by the number of target tokens, in
        every parameter's ``main_grad`` and returns, on the last pipeline stage, each microbatch's sum of losses.

        With the distributed optimizer a rank's ``main_grad`` is only whole where the rank updates it;
        ``force_all_reduce`` makes it whole everywhere.
        """
        if len(microbatches) != self.train.num_microbatches:
            raise ValueError(
                f"this step got {len(microbatches)} microbatches but was made for {self.train.num_microbatches} "
                "(num_microbatches); every rank must bring the same number"
            )
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        for router in self._routers:
            router.take_sums()
        return run(self, microbatches, forward_only=False, force_all_reduce=force_all_reduce)

    def _totals(self, microbatches: Sequence[Microbatch], losses: Sequence[torch.Tensor]) -> list[float]:
        """Sums over the whole step: loss, targets, tokens, squared lengths, and the routers' two."""
        sums = _batch_sums(microbatches, losses, self.device)
        routers = sum((router.take_sums() for router in self._routers), torch.zeros(2, device=self.device))
        return _over_all_ranks(torch.cat([sums, routers.double()]))


class EvalStep:
    """Evaluates the model of a ``TrainStep`` without touching its gradients, optimizer or schedule."""

    def __init__(self, step: TrainStep) -> None:
        self._step = step

    def __call__(self, microbatches: Sequence[Microbatch]) -> EvalReport:
        """The loss of this rank's ``microbatches`` with those of all other ranks; every rank brings as many."""
        chunks = self._step.chunks
        for chunk in chunks:
            chunk.eval()
        try:
            with torch.no_grad():
                losses = run(self._step, microbatches, forward_only=True)
        finally:
            for chunk in chunks:
                chunk.train()
        loss, targets, tokens, _ = _over_all_ranks(_batch_sums(microbatches, losses, self._step.device))
        return EvalReport(loss=loss / targets if targets else 0.0, target_tokens=int(targets), tokens=int(tokens))


def run(
    step: TrainStep, microbatches: Sequence[Microbatch], *, forward_only: bool, force_all_reduce: bool = False
) -> list[torch.Tensor]:
    """Megatron's schedule over ``microbatches``; on the last pipeline stage, each one's sum of losses."""
    forward = partial(
        _forward, device=step.device, backend=step.parallel.attention_backend, det=step.parallel.deterministic_mode
    )
    return get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=iter(microbatches),
        model=step.chunks,
        num_microbatches=len(microbatches),
        seq_length=step.model.seq_length,  # rows vary; stages tell each other their number
        micro_batch_size=1,
        forward_only=forward_only,
        force_all_reduce=force_all_reduce,
    )


def _forward(iterator: Iterator[Microbatch], model: torch.nn.Module, *, device: torch.device, backend: str, det: bool):
    """One microbatch through this rank's stage: the output, and the function that makes a loss of it."""
    batch = next(iterator)
    gpt = unwrap(model)
    targets = Targets.of(batch, device) if gpt.post_process else None
    batch = batch.to(device)
    padding = batch.padding_mask
    if padding is not None and not gpt.pre_process and gpt.config.sequence_parallel:
        # GPTModel splits the mask over the tensor-parallel ranks on the first stage only.
        group = gpt.pg_collection.tp
        padding = padding.chunk(group.size(), dim=1)[group.rank()]
    output = model(
        batch.tokens,
        batch.position_ids,
        None,
        packed_seq_params=ShardParams.from_microbatch(batch, domain_group(), backend=backend, deterministic=det),
        padding_mask=padding,
        output_processor=target_losses,
        output_processor_context=targets,
    )
    return output, sum_losses


def _batch_sums(
    microbatches: Sequence[Microbatch], losses: Sequence[torch.Tensor], device: torch.device
) -> torch.Tensor:
    """This rank's share of ``[loss, targets, tokens, squared lengths]`` in float64, each counted by one rank only."""
    sums = torch.zeros(4, dtype=torch.float64, device=device)
    if parallel_state.get_tensor_model_parallel_rank() != 0:
        return sums
    if losses:  # the last stage
        sums[0] = torch.stack(list(losses)).double().sum()
    if parallel_state.is_pipeline_first_stage() and parallel_state.get_context_parallel_rank() == 0:
        whole = [(batch.target_tokens, batch.num_tokens, batch.sum_squared_lengths) for batch in microbatches]
        sums[1:] = torch.tensor(whole, dtype=torch.float64, device=device).sum(dim=0)
    return sums


def _over_all_ranks(sums: torch.Tensor) -> list[float]:
    """Add up over data, context, pipeline and tensor parallelism, through communicators that exist anyway."""
    for group in (
        parallel_state.get_data_parallel_group(with_context_parallel=True),
        parallel_state.get_pipeline_model_parallel_group(),
        parallel_state.get_tensor_model_parallel_group(),
    ):
        if group.size() > 1:
            dist.all_reduce(sums, group=group)
    return sums.tolist()


def _require_finite(what: str, value: float) -> None:
    if not math.isfinite(value):
        raise FloatingPointError(f"the {what} is {value}; lower the learning rate or look at this step's samples")


def _wrap(chunk: GPTModel, model: ModelConfig, parallel: ParallelConfig) -> DistributedDataParallel:
    config = chunk.config
    return DistributedDataParallel(
        config,
        DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=parallel.overlap_grad_reduce,
            use_distributed_optimizer=parallel.use_distributed_optimizer,
            average_in_collective=False,  # gradients are sums, divided by the number of target tokens at the end
        ),
        Float16Module(config, chunk) if model.bf16 else chunk,
    )


def _optimizer(
    chunks: list[DistributedDataParallel], model: ModelConfig, parallel: ParallelConfig, train: TrainConfig
) -> MegatronOptimizer:
    return get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=train.lr,
            min_lr=train.min_lr,
            weight_decay=train.weight_decay,
            adam_beta1=train.adam_beta1,
            adam_beta2=train.adam_beta2,
            adam_eps=train.adam_eps,
            clip_grad=train.clip_grad,
            bf16=model.bf16,
            params_dtype=torch.bfloat16 if model.bf16 else torch.float32,
            use_distributed_optimizer=parallel.use_distributed_optimizer,
        ),
        chunks,
        use_gloo_process_groups=False,
    )
