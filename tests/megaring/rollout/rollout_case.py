"""Tiny models in the processes of the pool, generating under layouts and plans that a test names."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

from megaring.megatron import parallel
from megaring.megatron.config import ModelConfig, ParallelConfig
from megaring.megatron.model import build_model
from megaring.megatron.transformer import transformer_config
from megaring.rollout.layout import LAYOUTS
from megaring.rollout.ranks import Ranks
from megaring.rollout.runner import Runner

VOCABULARY = 120  # the embedding has 128 rows
MODEL = ModelConfig(
    num_layers=3,
    hidden_size=32,
    num_attention_heads=4,
    num_query_groups=2,
    kv_channels=8,
    vocab_size=VOCABULARY,
    seq_length=1024,
    ffn_hidden_size=48,
    num_experts=4,
    moe_ffn_hidden_size=16,
    init_method_std=0.3,
)
DENSE = replace(
    MODEL, num_experts=None, num_attention_heads=8, num_query_groups=4, untie_embeddings_and_output_weights=False
)
MEMORY = 1 << 22  # bytes of a rank's arena
TIMEOUT = timedelta(seconds=50)


def make_model(ranks: int, model: ModelConfig, seed: int, dtype: torch.dtype) -> GPTModel:
    """This rank's part of a model whose norms are not all ones."""
    logging.disable(logging.INFO)
    experts = ranks if model.num_experts else 1
    layout = ParallelConfig(tensor_model_parallel_size=ranks, expert_model_parallel_size=experts)
    if not parallel_state.model_parallel_is_initialized():
        parallel.start(layout, seed=0)
    (chunk,) = build_model(model, layout, seed=seed)
    for name, parameter in chunk.named_parameters():
        if name.endswith("norm.weight"):
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) + seed)
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
    return as_type(chunk, dtype)


def as_type(chunk: GPTModel, dtype: torch.dtype) -> GPTModel:
    chunk.to(dtype)
    if dtype == torch.float64:
        chunk.config.moe_router_dtype = "fp64"
    return chunk


def make_runner(
    ranks: int,
    model: ModelConfig = MODEL,
    *,
    layout: str = "TP",
    seed: int = 3,
    dtype: torch.dtype = torch.float64,
    memory: int = MEMORY,
) -> Runner:
    return over_ranks(make_model(ranks, model, seed, dtype), ranks, layout, memory)


def over_ranks(chunk: GPTModel, ranks: int, layout: str, memory: int = MEMORY) -> Runner:
    group = Ranks.over(parallel_state.get_tensor_model_parallel_group(), TIMEOUT) if ranks > 1 else Ranks.single()
    return Runner(chunk, group, memory=memory, layout=LAYOUTS[layout], vocab_size=VOCABULARY)


def plain_logits(
    rank: int, world_size: int, model: ModelConfig, sequences: Sequence[np.ndarray], seed: int = 3
) -> list[np.ndarray]:
    """Logits of whole sequences from a stock Megatron model in fp64, one plain forward pass each; on one process."""
    chunk = make_model(1, model, seed, torch.float64)
    config = transformer_config(model, ParallelConfig())
    config.params_dtype = torch.float64
    config.moe_router_dtype = "fp64"
    stock = GPTModel(
        config,
        get_gpt_layer_local_spec(num_experts=model.num_experts, qk_layernorm=True, normalization="RMSNorm"),
        vocab_size=model.padded_vocab_size,
        max_sequence_length=model.seq_length,
        position_embedding_type="rope",
        rotary_base=model.rotary_base,
        share_embeddings_and_output_weights=not model.untie_embeddings_and_output_weights,
    ).double()
    stock.eval()
    weights = {name: value for name, value in chunk.state_dict().items() if value is not None}
    assert not stock.load_state_dict(weights, strict=False).unexpected_keys
    found = [plain_forward(stock, sequence) for sequence in sequences]
    parallel.stop()
    return found


def plain_forward(model: GPTModel, sequence: np.ndarray) -> np.ndarray:
    """Logits ``[n, VOCABULARY]`` of a whole sequence on one process.

    It is padded at the end: the fp32 cosines of Megatron's last positions are otherwise computed by other code, which
    differs in the last bit.
    """
    rows = -(-len(sequence) // 64) * 64
    tokens = torch.from_numpy(np.pad(sequence, (0, rows - len(sequence))))[None]
    future = torch.ones(1, 1, rows, rows).triu(1).bool()
    with torch.no_grad():
        logits = model(tokens, torch.arange(rows)[None], future)
    return logits[0, : len(sequence), :VOCABULARY].numpy()
