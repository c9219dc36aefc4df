"""Each layout's logits, chunk by chunk, are those of a plain forward pass of stock Megatron over whole sequences."""

from __future__ import annotations

import numpy as np
import pytest
from mla_case import PLAIN_ROPE, V2_LITE, V3, make_mla_runner, plain_mla_logits
from rollout_case import DENSE, MODEL, VOCABULARY, make_runner, plain_logits

from megaring.megatron import parallel
from megaring.rollout.step import Chunk, StepPlan

LENGTHS = (150, 70, 3, 131, 64)
SEQUENCES = [np.random.default_rng(n).integers(0, VOCABULARY, n) for n in LENGTHS]
OWNERS = (0, 1, 1, 0, 0)  # of 4 ranks two own nothing
# Tokens of each sequence in every step: whole prompts, chunks of them beside single tokens, and rests.
STEPS = ((100, 70, 0, 0, 63), (1, 0, 2, 129, 1), (48, 0, 1, 1, 0), (1, 0, 0, 1, 0))


def chunked(rank, world_size, make, model, layout):
    """Logits of all sequences under one layout, computed in the chunks of ``STEPS``."""
    runner = make(world_size, model, layout=layout)
    done, found = [0] * len(LENGTHS), [[] for _ in LENGTHS]
    for number, counts in enumerate(STEPS):
        chunks = [
            Chunk(
                index,
                OWNERS[index] % world_size,
                done[index],
                tuple(map(int, SEQUENCES[index][done[index] :][:count])),
                "all",
            )
            for index, count in enumerate(counts)
            if count
        ]
        result = runner.step(StepPlan(number, layout, tuple(chunks)))
        rows = result.logits.split([len(chunk.tokens) for chunk in chunks])
        for chunk, part in zip(chunks, rows, strict=True):
            found[chunk.request].append(part.double().numpy())
            done[chunk.request] += len(chunk.tokens)
    assert tuple(done) == LENGTHS
    parallel.stop()
    return [np.concatenate(parts) for parts in found]


@pytest.fixture(scope="module")
def plain(pool):
    return {model: pool.run(1, plain_logits, model, SEQUENCES)[0] for model in (MODEL, DENSE)}


@pytest.mark.parametrize("layout", ["TP", "DP", "CP", "DOP"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_equal_to_a_plain_forward_pass(pool, plain, layout, ranks):
    for model in (MODEL, DENSE) if ranks == 2 else (MODEL,):
        for outcome in pool.run(ranks, chunked, make_runner, model, layout):
            for found, expected in zip(outcome, plain[model], strict=True):
                np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12 * np.abs(expected).max())


def exchanged(rank, world_size):
    """Elements of a step that this rank sends to others in DOP's all-to-alls."""
    runner, sent = make_mla_runner(world_size, V3, layout="DOP"), []
    exchange = runner.ranks.exchange

    def counted(parts, counts):
        sent.append(sum(part.numel() for peer, part in enumerate(parts) if peer != rank))
        return exchange(parts, counts)

    runner.ranks.exchange = counted
    chunks = [Chunk(index, owner, 0, (1,) * rows) for index, (owner, rows) in enumerate(((0, 5), (1, 1), (0, 2)))]
    runner.step(StepPlan(0, "DOP", tuple(chunks)))
    parallel.stop()
    return sum(sent)


@pytest.mark.parametrize("ranks", [2, 4])
def test_dop_sends_what_the_paper_says(pool, ranks):
    rows, heads, latent, rotary, layers = 8, 4, 16, 4, 3
    per_layer = rows * heads * (latent + rotary + latent) * (ranks - 1) // ranks  # (1 - 1/T) N H (d_q + d_z)
    assert sum(pool.run(ranks, exchanged)) == layers * per_layer


MLA = {"v2-lite": V2_LITE, "v3": V3, "rope": PLAIN_ROPE}


@pytest.fixture(scope="module")
def plain_mla(pool):
    return {name: pool.run(1, plain_mla_logits, kind, SEQUENCES)[0] for name, kind in MLA.items()}


@pytest.mark.parametrize("layout", ["TP", "DP", "CP", "DOP"])
@pytest.mark.parametrize(("name", "ranks"), [("v2-lite", 2), ("v3", 4), ("v3", 2), ("rope", 1)])
def test_mla_equal_to_a_plain_forward_pass(pool, plain_mla, layout, name, ranks):
    for outcome in pool.run(ranks, chunked, make_mla_runner, MLA[name], layout):
        for found, expected in zip(outcome, plain_mla[name], strict=True):
            np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12 * np.abs(expected).max())
