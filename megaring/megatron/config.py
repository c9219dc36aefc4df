"""What to train and how to spread it: frozen settings in Megatron-LM's option names. No torch, no megatron.

``ModelConfig.from_options(args)`` picks its fields from any object with those attributes, such as parsed options;
``checks.check_settings`` refuses what cannot work; ``model.build_model`` takes the result.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Self


class _Options:
    @classmethod
    def from_options(cls, options: Any) -> Self:
        """Build from the attributes of ``options`` that have the names of the fields; the others keep their default."""
        given = {field.name: getattr(options, field.name) for field in fields(cls) if hasattr(options, field.name)}
        return cls(**given)


@dataclass(frozen=True)
class ModelConfig(_Options):
    """A decoder of the Qwen3 kind: GQA, RMSNorm (also on queries and keys), RoPE, SwiGLU; dense or mixture of experts.

    The defaults that are None depend on other fields and are filled in: ``num_query_groups`` (one per query head),
    ``kv_channels`` (hidden size / heads), ``ffn_hidden_size`` (4 x hidden size), ``moe_ffn_hidden_size`` (that of
    the dense layer). ``seq_length`` is the longest sequence in tokens. Fields that only exist to be refused when they
    ask for what no attention backend has: ``attention_dropout``, ``hidden_dropout``, ``window_size``,
    ``mtp_num_layers``, ``moe_router_load_balancing_type``, ``moe_token_dispatcher_type``.
    """

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    vocab_size: int
    seq_length: int
    num_query_groups: int | None = None
    kv_channels: int | None = None
    ffn_hidden_size: int | None = None
    num_experts: int | None = None
    moe_ffn_hidden_size: int | None = None
    moe_router_topk: int = 2
    moe_aux_loss_coeff: float = 0.0
    moe_z_loss_coeff: float | None = None
    moe_router_load_balancing_type: str = "aux_loss"
    moe_token_dispatcher_type: str = "alltoall"
    moe_grouped_gemm: bool = False
    norm_epsilon: float = 1e-6
    rotary_base: int = 1_000_000
    qk_layernorm: bool = True
    untie_embeddings_and_output_weights: bool = True
    make_vocab_size_divisible_by: int = 128
    init_method_std: float = 0.02
    attention_dropout: float = 0.0
    hidden_dropout: float = 0.0
    window_size: str | None = None
    mtp_num_layers: int | None = None
    bf16: bool = False
    recompute_granularity: str | None = None
    recompute_method: str = "uniform"
    recompute_num_layers: int = 1

    def __post_init__(self) -> None:
        filled = {
            "num_query_groups": self.num_attention_heads,
            "kv_channels": self.hidden_size // self.num_attention_heads,
            "ffn_hidden_size": 4 * self.hidden_size,
        }
        for name, value in filled.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        if self.moe_ffn_hidden_size is None:
            object.__setattr__(self, "moe_ffn_hidden_size", self.ffn_hidden_size)

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding: ``vocab_size`` rounded up to ``make_vocab_size_divisible_by``.

        Unlike Megatron-LM's rule this does not depend on the tensor-parallel size, so that checkpoints and losses
        do not either.
        """
        return -(-self.vocab_size // self.make_vocab_size_divisible_by) * self.make_vocab_size_divisible_by


@dataclass(frozen=True)
class ParallelConfig(_Options):
    """How ranks are used. The rank domain of BuddyRing is Megatron's context-parallel group.

    Ranks are ordered as Megatron orders them: tensor parallel innermost, then context, data, pipeline. Expert
    parallelism runs over the same ranks as tensor, context and data parallelism together. Data parallelism takes
    whatever the world holds beyond that. ``sequence_parallel`` only says something with tensor parallelism, where it
    cannot be off. ``attention_backend``: one of ``auto``, ``fused``, ``ring``, ``reference``.
    """

    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    context_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int = 1
    sequence_parallel: bool = True
    use_distributed_optimizer: bool = False
    overlap_grad_reduce: bool = False
    attention_backend: str = "auto"
    deterministic_mode: bool = False
    distributed_timeout_minutes: int = 10

    @property
    def model_parallel_size(self) -> int:
        """Ranks that one replica of the domain takes: tensor x pipeline x context."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size

    @property
    def rank_multiple(self) -> int:
        """What the rows of every rank must be a multiple of: sequence parallelism splits them over the TP ranks."""
        return self.tensor_model_parallel_size

    def data_parallel_size(self, world_size: int) -> int:
        """Replicas of the domain in a world of ``world_size`` ranks, which ``checks`` has found to be divisible."""
        return world_size // self.model_parallel_size


@dataclass(frozen=True)
class TrainConfig(_Options):
    """Adam (decoupled weight decay) with linear warm-up and decay of the learning rate, counted in steps.

    ``lr_decay_iters`` defaults to ``train_iters``. ``clip_grad`` is the largest norm of the whole gradient, 0 for none.
    ``num_microbatches`` are per step and replica of the domain. ``seed`` also seeds the initial weights.
    """

    train_iters: int
    lr: float
    min_lr: float = 0.0
    lr_decay_style: str = "cosine"
    lr_warmup_iters: int = 0
    lr_decay_iters: int | None = None
    weight_decay: float = 0.1
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    adam_eps: float = 1e-8
    clip_grad: float = 1.0
    num_microbatches: int = 1
    seed: int = 1234

    def __post_init__(self) -> None:
        if self.lr_decay_iters is None:
            object.__setattr__(self, "lr_decay_iters", self.train_iters)
