"""The pretraining run: model, loader, steps, evaluation, checkpoints. ``pretrain`` is one call per process."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from buddyring import Placement
from buddyring.draw import DrawingError, draw_placement
from megaring.backends import fused
from megaring.data.loader import Evaluation, Loader, LoaderConfig
from megaring.data.microbatch import Microbatch
from megaring.errors import UserError
from megaring.megatron import checkpoint, parallel
from megaring.megatron.flops import mfu, model_flops
from megaring.megatron.model import build_model
from megaring.megatron.step import EvalStep, StepReport, TrainStep
from megaring.metrics import Reporter, placement_figures
from megaring.preflight import Run

_SHAPE = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "padded_vocab_size",
    "num_experts",
    "moe_ffn_hidden_size",
    "qk_layernorm",
    "untie_embeddings_and_output_weights",
)


def pretrain(run: Run) -> None:
    """Train ``run`` to its last step on this process, which torchrun has started along with its peers."""
    checkpoint.start_queue()
    device = parallel.start(run.parallel, seed=run.training.seed)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("megatron").setLevel(logging.ERROR)  # notices of its own deprecations, once per rank
    if dist.get_rank() == 0:
        logging.getLogger("megaring").setLevel(logging.INFO)
    _check_backend(run, device)
    trainer = _Trainer(run, device)
    try:
        trainer.train()
    finally:
        trainer.close()
    dist.barrier()  # nobody leaves while a peer still writes
    parallel.stop()


def _check_backend(run: Run, device: torch.device) -> None:
    if run.parallel.attention_backend != "fused":
        return
    dtype = torch.bfloat16 if run.model.bf16 else torch.float32
    reason = fused.start_refusal(device, dtype, run.model.kv_channels, run.parallel.deterministic_mode)
    if reason is not None:
        raise UserError(f"--attention-backend fused cannot train here: {reason}; use auto or ring")


class _Trainer:
    """One process's part of a run; rank 0 also reports."""

    def __init__(self, run: Run, device: torch.device):
        self.run, self.device = run, device
        self.step = TrainStep(
            build_model(run.model, run.parallel, seed=run.training.seed), run.model, run.parallel, run.training
        )
        self.trainee = checkpoint.Trainee(self.step.chunks, self.step.optimizer, self.step.scheduler)
        self.done, position, source = self._resume()
        config = self._loader_config()
        self.loader = Loader(run.train, config, state=position)
        self.held_out = None
        if run.valid is not None:
            # It draws from its own sampler and leaves the training order alone.
            self.held_out = Evaluation(run.valid, replace(config, prefetch=1), run.options.eval_iters)
        self.reporter = self._reporter() if dist.get_rank() == 0 else None
        self._mixed = self._placed = 0
        self._drawn = False
        self._introduce(source)

    def close(self) -> None:
        """End the loader's thread and close the figures."""
        self.loader.close()
        if self.reporter is not None:
            self.reporter.close()

    def train(self) -> None:
        """All steps that are left, with evaluations and checkpoints between them."""
        options, last = self.run.options, self.run.training.train_iters
        if self.done >= last:
            self._say(f"step {self.done} of {last} is done: raise --train-iters, or choose another --output-dir")
            return
        if self.done == 0:
            self._evaluate()
        while self.done < last:
            started = time.perf_counter()
            microbatches = [next(self.loader) for _ in range(self.run.training.num_microbatches)]
            report = self.step(microbatches)
            self.done += 1
            self._report_step(report, microbatches, time.perf_counter() - started)
            if self.done % options.eval_interval == 0 or self.done == last:
                self._evaluate()
            due = options.save_interval and self.done % options.save_interval == 0
            if due or (self.done == last and options.save_last):
                self._save()
        if self._placed:
            share = self._mixed / self._placed
            self._say(f"{self._mixed} of {self._placed} steps ({share:.0%}) mixed group sizes")
            self._record("summary", {"steps": self._placed, "mixed_steps": self._mixed, "mixed_share": share})

    def _loader_config(self) -> LoaderConfig:
        options = self.run.options
        return LoaderConfig(
            token_budget=options.token_budget,
            seed=options.seed,
            vocab_size=self.run.model.vocab_size,
            ranks=self.run.domain,
            rank=parallel_state.get_context_parallel_rank(),
            replicas=self.run.replicas,
            replica=parallel_state.get_data_parallel_rank(),
            plan_options=self.run.plan_options,
            pin_memory=self.device.type == "cuda",
        )

    def _layout(self) -> dict[str, int]:
        layout = self.run.parallel
        return {
            "tensor_model_parallel_size": layout.tensor_model_parallel_size,
            "pipeline_model_parallel_size": layout.pipeline_model_parallel_size,
            "context_parallel_size": layout.context_parallel_size,
            "expert_model_parallel_size": layout.expert_model_parallel_size,
            "data_parallel_size": self.run.replicas,
            "use_distributed_optimizer": int(layout.use_distributed_optimizer),
        }

    def _shape(self) -> dict[str, Any]:
        return {name: getattr(self.run.model, name) for name in _SHAPE}

    def _resume(self) -> tuple[int, dict[str, Any] | None, Path | None]:
        """Steps done, position in the data and the checkpoint they come from; rank 0 chooses the checkpoint."""
        options = self.run.options
        choice: list[Any] = [None]
        if dist.get_rank() == 0:
            choice = [checkpoint.newest(Path(options.load) if options.load else self.run.save_dir)]
        dist.broadcast_object_list(choice, src=0)
        path = choice[0]
        if path is None:
            if options.load:
                raise UserError(f"--load {options.load} holds no whole checkpoint; name the folder of the iter_* ones")
            return 0, None, None
        summary = checkpoint.load(path, self.trainee, self._layout(), self._shape(), weights_only=options.finetune)
        if options.finetune:
            return 0, None, path
        return summary["iteration"], summary["progress"]["loader"], path

    def _save(self) -> None:
        started = time.perf_counter()
        path = checkpoint.save(
            self.run.save_dir,
            self.done,
            self.trainee,
            {"loader": self.loader.state()},
            self._layout(),
            self._shape(),
            self.run.options.keep_checkpoints,
        )
        seconds = time.perf_counter() - started
        self._say(f"saved {path} in {seconds:.1f} s")
        self._record("checkpoint", {"step": self.done, "path": str(path), "seconds": seconds})

    def _evaluate(self) -> None:
        if self.held_out is None:
            return
        started = time.perf_counter()
        report = EvalStep(self.step)(list(self.held_out))
        seconds = time.perf_counter() - started
        self._say(f"held-out loss {report.loss:.4f} over {report.target_tokens:,} tokens after step {self.done}")
        figures = {"step": self.done, "loss": report.loss, "target_tokens": report.target_tokens, "seconds": seconds}
        self._record("valid", figures)

    def _report_step(self, report: StepReport, microbatches: Sequence[Microbatch], seconds: float) -> None:
        """Figures of a step; the placements are those of rank 0's own replica of the domain."""
        if self.reporter is None:
            return
        placements = [microbatch.placement for microbatch in microbatches]
        placed = placement_figures(placements)
        self._placed += 1
        self._mixed += placed["mixed"]
        if placed["mixed"] and not self._drawn:
            self._drawn = True
            self._draw(next(p for p in placements if len({group.size for group in p.groups}) > 1))
        gpus = dist.get_world_size() if self.device.type == "cuda" else 0
        flops = model_flops(self.run.model, report.tokens, report.sum_squared_lengths)
        figures = {
            "step": self.done,
            **asdict(report),
            "step_s": seconds,
            "tokens_per_s": report.tokens / seconds,
            "tflops_per_rank": flops / seconds / dist.get_world_size() / 1e12,
            "mfu": mfu(flops, seconds, gpus, torch.cuda.get_device_name()) if gpus else None,
            "memory_gib": (torch.cuda.max_memory_allocated() if gpus else psutil.Process().memory_info().rss) / 2**30,
            **placed,
        }
        show = self.done % self.run.options.log_interval == 0 or self.done == self.run.training.train_iters
        self.reporter.train_step(figures, show)

    def _draw(self, placement: Placement) -> None:
        path = self.run.output_dir / "placement.png"
        try:
            draw_placement(placement, path, title=f"Step {self.done}: {len(placement.lengths)} sequences")
            self._say(f"the placement of step {self.done} is drawn in {path}")
        except DrawingError as error:
            self._say(f"no picture of the placement: {error}")

    def _reporter(self) -> Reporter:
        options = self.run.options
        wandb_settings = None
        if options.wandb_project:
            wandb_settings = {
                "project": options.wandb_project,
                "name": options.wandb_exp_name,
                "mode": options.wandb_mode,
                "config": vars(options),
            }
        path = self.run.output_dir / "metrics.jsonl"
        return Reporter(path, self.run.training.train_iters, self.done, wandb_settings)

    def _introduce(self, source: Path | None) -> None:
        run, options = self.run, self.run.options
        layout = run.parallel
        capacity = run.plan_options["capacity"]
        parameters = sum(p.numel() for chunk in self.step.chunks for p in chunk.parameters())
        self._say(
            f"{run.world_size} ranks: {run.replicas} x domain of {run.domain}, tensor "
            f"{layout.tensor_model_parallel_size}, pipeline {layout.pipeline_model_parallel_size}, expert "
            f"{layout.expert_model_parallel_size}; {parameters / 1e6:,.1f} M parameters on this rank"
        )
        self._say(
            f"corpus {options.data_path}: {len(run.train):,} sequences, {int(run.train.lengths.sum()):,} tokens; "
            f"{options.token_budget:,} tokens a microbatch, {options.token_budget / run.domain:,.0f} a rank on average"
            + (f", at most {capacity:,}" if capacity else "")
        )
        if source is not None:
            self._say(f"{'weights' if self.done == 0 else f'resumed after step {self.done}'} from {source}")
        self._record("run", {"options": vars(options), "world_size": run.world_size, "resumed_after": self.done})

    def _say(self, text: str) -> None:
        if self.reporter is not None:
            self.reporter.say(text)

    def _record(self, kind: str, figures: dict[str, Any]) -> None:
        if self.reporter is not None:
            self.reporter.record(kind, figures)
