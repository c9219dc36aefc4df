"""What a generation worker is made of, checked before anything heavy is imported. No torch, no megatron."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megaring.errors import UserError
from megaring.megatron.checks import check_model, check_supported
from megaring.megatron.config import ModelConfig, ParallelConfig


@dataclass(frozen=True)
class WorkerConfig:
    """``memory``: bytes of each rank's arena; by default 64 MiB on a CPU, 80 % of what is free on a GPU. ``load``: a
    checkpoint of training or a folder of them, else random weights by ``seed``. ``wait``: seconds after which a rank
    gives up on its peers. Raises UserError for what cannot be served.
    """

    model: ModelConfig
    ranks: int
    layout: str
    seed: int
    memory: int | None = None
    load: Path | None = None
    wait: float = 600.0

    def __post_init__(self) -> None:
        model = self.model
        check_supported(model, self.parallel)
        check_model(model)
        sizes = {
            "--num-experts": model.num_experts or 0,
            "--num-attention-heads": model.num_attention_heads,
            "the padded --vocab-size": model.padded_vocab_size,
        }
        for name, size in sizes.items():
            if size % self.ranks:
                raise UserError(f"--ranks {self.ranks} does not divide {name}, {size}; choose a divisor")

    @property
    def parallel(self) -> ParallelConfig:
        """How Megatron cuts the model: attention and MLP by head and column, experts whole."""
        return ParallelConfig(
            tensor_model_parallel_size=self.ranks,
            expert_model_parallel_size=self.ranks if self.model.num_experts else 1,
            distributed_timeout_minutes=max(1, round(self.wait / 60)),
        )
