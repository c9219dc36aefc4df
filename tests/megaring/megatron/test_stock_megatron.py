"""One process of ours is one process of unmodified Megatron: an oracle that shares no module with the one it judges."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest
import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from model_case import MODEL, ONE_PROCESS, TRAIN, Batch, gradients_of

from megaring.megatron import parallel
from megaring.megatron.config import ModelConfig
from megaring.megatron.loss import unwrap
from megaring.megatron.model import build_model
from megaring.megatron.step import TrainStep
from megaring.megatron.transformer import transformer_config


def stock_gradients(model: ModelConfig, weights: dict, sequences: list[np.ndarray]) -> tuple[float, dict]:
    """Sum of losses, and gradients of that sum over the number of targets, one plain sequence after the other."""
    config = transformer_config(model, ONE_PROCESS)
    spec = get_gpt_layer_local_spec(num_experts=model.num_experts, qk_layernorm=True, normalization="RMSNorm")
    gpt = GPTModel(
        config,
        spec,
        vocab_size=model.padded_vocab_size,
        max_sequence_length=model.seq_length,
        position_embedding_type="rope",
        rotary_base=model.rotary_base,
    )
    missing = gpt.load_state_dict(weights, strict=False)
    assert not missing.unexpected_keys
    MoEAuxLossAutoScaler.set_loss_scale(torch.ones(1))
    total, targets = 0.0, sum(len(s) - 1 for s in sequences)
    for sequence in sequences:
        tokens = torch.from_numpy(sequence)[None]
        labels = tokens.roll(-1, dims=1)
        mask = torch.ones(tokens.shape)
        mask[0, -1] = 0
        positions = torch.arange(len(sequence))[None]
        future = torch.ones(1, 1, len(sequence), len(sequence)).triu(1).bool()
        loss = (gpt(tokens, positions, future, labels=labels) * mask).sum()
        loss.backward()
        total += float(loss.detach())
    return total, {name: p.grad.numpy() / targets for name, p in gpt.named_parameters()}


def compare(rank: int, world_size: int, model: ModelConfig, batch: Batch) -> tuple[float, float, dict]:
    parallel.start(ONE_PROCESS, seed=0)
    model_parallel_cuda_manual_seed(0)
    step = TrainStep(build_model(model, ONE_PROCESS, seed=3), model, ONE_PROCESS, TRAIN)
    weights = {k: v for k, v in unwrap(step.chunks[0]).state_dict().items() if v is not None}
    ours = float(sum(step.gradients([batch.microbatch(ONE_PROCESS, 0)])))
    found = {place.name: gradient for place, gradient in gradients_of(step)}
    theirs, expected = stock_gradients(model, weights, batch.sequences())
    parallel.stop()
    errors = {n: float(np.abs(found[n] - g).max() / np.abs(g).max()) for n, g in expected.items()}
    return ours, theirs, errors


@pytest.mark.parametrize(
    ("model", "lengths"),
    [
        # Balancing losses are those of a microbatch, so with them both must see the same one: a single sequence.
        (MODEL, (50,)),
        (replace(MODEL, moe_aux_loss_coeff=0.0, moe_z_loss_coeff=None), (50, 31, 12, 2)),
        (replace(MODEL, num_experts=None), (50, 31, 12, 2)),
    ],
    ids=["balanced", "packed", "dense"],
)
def test_gradients_of_stock_megatron(pool, model, lengths):
    ours, theirs, errors = pool.run(1, functools.partial(compare, model=model, batch=Batch(lengths, {})))[0]
    assert ours == pytest.approx(theirs, rel=1e-6)
    worst = max(errors, key=errors.get)
    assert errors[worst] < 5e-6, worst
