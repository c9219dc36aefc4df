"""Where parameters lie, and the weights they start from."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from model_case import MODEL, ONE_PROCESS

from megaring.megatron import parallel
from megaring.megatron.model import build_model
from megaring.megatron.parameters import Place, placed_parameters


def test_gate_and_up_are_cut_apart():
    whole = torch.arange(8.0)[:, None]  # gate 0..3, up 4..7
    parts = [Place("fc1", (8, 1), 0, 4, rank, 2) for rank in range(2)]
    assert parts[0].cut(whole).flatten().tolist() == [0, 1, 4, 5]
    assert parts[1].cut(whole).flatten().tolist() == [2, 3, 6, 7]


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("stride", [1, 2])
def test_paste_undoes_cut(dim, stride):
    whole = torch.randn(12, 12)
    again = torch.full_like(whole, float("nan"))
    for rank in range(3):
        place = Place("w", (12, 12), dim, 3 * stride, rank, 3)
        place.paste(again, place.cut(whole))
    assert torch.equal(again, whole)


def weights(rank: int, world_size: int, seed: int) -> dict[str, np.ndarray]:
    parallel.start(ONE_PROCESS, seed=0)
    model = replace(MODEL, hidden_size=256, init_method_std=0.02)
    chunk = build_model(model, ONE_PROCESS, seed=seed)[0]
    found = {place.name: p.detach().numpy().copy() for place, p in placed_parameters(chunk)}
    parallel.stop()
    return found


def test_initial_weights(pool):
    first, again, other = (pool.run(1, weights, seed)[0] for seed in (1, 1, 2))
    matrices = {name for name, weight in first.items() if weight.ndim == 2}
    assert len({first[name].tobytes() for name in matrices}) == len(matrices)  # no two alike, experts neither
    for name, weight in first.items():
        assert np.array_equal(weight, again[name]), name
        if name not in matrices:
            assert (weight == 1).all(), name
            continue
        assert not np.array_equal(weight, other[name]), name
        residual = name.endswith(("linear_proj.weight", "linear_fc2.weight"))
        std = 0.02 / (2 * MODEL.num_layers) ** 0.5 if residual else 0.02
        assert weight.std() == pytest.approx(std, rel=0.1), name
        assert abs(weight.mean()) < std / 10, name
