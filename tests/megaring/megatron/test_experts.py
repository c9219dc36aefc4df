"""Grouped experts against Megatron's loop over the same experts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from megatron.core.transformer.moe.experts import SequentialMLP
from model_case import MODEL, ONE_PROCESS

from megaring.megatron import parallel
from megaring.megatron.experts import GroupedExperts
from megaring.megatron.model import build_model


def both(rank: int, world_size: int, counts: list[int]) -> list[float]:
    """Largest differences of outputs, input gradients, weight gradients and the gradient of the routing weights."""
    parallel.start(ONE_PROCESS, seed=0)
    chunk = build_model(replace(MODEL, moe_grouped_gemm=True), ONE_PROCESS, seed=3)[0]
    experts = chunk.decoder.layers[0].mlp.experts
    assert type(experts) is GroupedExperts
    generator = torch.Generator().manual_seed(0)
    n, results = sum(counts), []
    hidden, target = (torch.randn(n, MODEL.hidden_size, generator=generator) for _ in range(2))
    probs = torch.rand(n, generator=generator)
    for forward in (GroupedExperts.forward, SequentialMLP.forward):
        experts.zero_grad()
        x, p = hidden.clone().requires_grad_(), probs.clone().requires_grad_()
        out, bias = forward(experts, x, torch.tensor(counts), p)
        assert bias is None
        (out * target).sum().backward()
        weights = torch.cat([w.grad.flatten() for w in experts.parameters()])
        results.append((out.detach(), x.grad, weights, p.grad))
    parallel.stop()
    for grouped, sequential in zip(*results, strict=True):
        assert grouped.shape == sequential.shape
    return [float((a - b).abs().max()) if a.numel() else 0.0 for a, b in zip(*results, strict=True)]


@pytest.mark.parametrize("counts", [[5, 0, 17, 8], [0, 0, 0, 3], [0, 0, 0, 0]])
def test_grouped_experts_are_sequential_experts(pool, counts):
    assert pool.run(1, both, counts)[0] == pytest.approx([0.0] * 4, abs=1e-5)
