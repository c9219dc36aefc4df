"""Workers from the checkpoints of training, on other numbers of ranks; and what is refused before one starts."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megaring.errors import UserError
from megaring.megatron import parallel
from megaring.megatron.config import ModelConfig
from megaring.recipe import parse
from megaring.rollout.step import Chunk, StepPlan
from megaring.rollout.worker import start
from megaring.rollout.worker_config import WorkerConfig

sys.path.append(str(Path(__file__).parents[1] / "megatron"))
from pretrain_case import MODEL, make_corpus, train

PROMPT = tuple(np.random.default_rng(1).integers(0, 256, 70).tolist())


def model(**changes):
    return replace(ModelConfig.from_options(parse([*MODEL, "--vocab-size", "257"])), **changes)


def logits(rank, world_size, config):
    runner = start(config)
    found = runner.step(StepPlan(0, "DOP", (Chunk(0, 0, 0, PROMPT, "all"),))).logits.numpy()
    weight = runner.decoder.model.decoder.final_layernorm.weight.detach().numpy().copy()
    parallel.stop()
    return found, weight


def plain(rank, world_size, checkpoint, name):
    from megatron.core.dist_checkpointing import load_plain_tensors

    return load_plain_tensors(str(checkpoint))[name].numpy()


@pytest.fixture(scope="module")
def checkpoint(pool, tmp_path_factory):
    """Three large steps of training on two ranks, which are context-parallel."""
    folder = tmp_path_factory.mktemp("trained")
    options = ["--data-path", make_corpus(folder), "--output-dir", str(folder), "--context-parallel-size", "2"]
    options += ["--train-iters", "3", "--lr", "0.05", "--save-interval", "3"]
    pool.run(2, train, options, timeout=120)
    return next(folder.rglob("iter_0000003"))


def test_trained_weights_are_the_same_on_any_number_of_ranks(pool, checkpoint):
    config = WorkerConfig(model(), 1, "DOP", seed=0, load=checkpoint)
    (alone, weight), *_ = pool.run(1, logits, config)
    norm = pool.run(1, plain, checkpoint, "decoder.final_layernorm.weight")[0]
    np.testing.assert_array_equal(weight, norm)
    assert np.abs(weight - 1).max() > 0.01
    for found, _ in pool.run(2, logits, replace(config, ranks=2, load=checkpoint.parent)):
        np.testing.assert_allclose(found, alone, rtol=0, atol=1e-5 * np.abs(alone).max())


def test_a_checkpoint_of_another_model_is_refused(pool, checkpoint):
    config = WorkerConfig(model(num_layers=3), 1, "DOP", seed=0, load=checkpoint)
    with pytest.raises(AssertionError, match="has num_layers 2, this model 3"):
        pool.run(1, logits, config)


def test_an_arena_that_is_too_small_is_refused(pool):
    with pytest.raises(AssertionError, match=r"--memory is 0 MiB a rank"):
        pool.run(1, logits, WorkerConfig(model(), 1, "DOP", seed=0, memory=20_000))


@pytest.mark.parametrize(
    ("ranks", "changes", "message"),
    [
        (8, {}, "--ranks 8 does not divide --num-experts, 4"),
        (8, {"num_experts": None}, "--ranks 8 does not divide --num-attention-heads, 4"),
        (2, {"window_size": "64"}, "--window-size is not supported"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(ranks, changes, message):
    with pytest.raises(UserError, match=message):
        WorkerConfig(model(**changes), ranks, "TP", seed=0)
