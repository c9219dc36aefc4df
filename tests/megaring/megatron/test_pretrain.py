import json
import shutil

import pytest
import torch
from distributed_pool import CaseFailed
from pretrain_case import first_moments, losses, make_corpus, metrics, train

from megaring.megatron.checkpoint import newest

LIMIT = 240.0  # seconds for a case on a busy machine


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpora")
    return make_corpus(folder), make_corpus(folder, "valid", documents=6, seed=1)


@pytest.fixture(scope="module")
def one_process(pool, corpora, tmp_path_factory):
    """Two steps on one process, with a checkpoint after each: what every layout must reproduce."""
    out = tmp_path_factory.mktemp("one")
    argv = ["--data-path", corpora[0], "--output-dir", str(out), "--train-iters", "2", "--save-interval", "1"]
    pool.run(1, train, argv, timeout=LIMIT)
    return out


@pytest.mark.parametrize(
    ("world_size", "layout"),
    [
        (4, []),
        (4, ["--cp-scheduler", "uniform", "--attention-backend", "reference"]),
        (4, ["--tensor-model-parallel-size", "2", "--recompute-granularity", "full"]),
    ],
    ids=["buddyring", "uniform-reference", "tensor-recompute"],
)
def test_the_whole_path_gives_the_gradient_of_one_process(pool, corpora, one_process, tmp_path, world_size, layout):
    argv = ["--data-path", corpora[0], "--output-dir", str(tmp_path), "--train-iters", "2", "--save-interval", "1"]
    pool.run(world_size, train, [*argv, *layout], timeout=LIMIT)
    for mine, theirs in zip(losses(tmp_path), losses(one_process), strict=True):
        assert mine == pytest.approx(theirs, rel=2e-5)
    after_one = [str(out / "checkpoints" / "iter_0000001") for out in (tmp_path, one_process)]
    (found,), (wanted,) = (pool.run(1, first_moments, path) for path in after_one)
    assert found.keys() == wanted.keys() and len(wanted) > 10
    for name, gradient in wanted.items():
        assert gradient.norm() > 0, name
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-5 * gradient.abs().max().item(), msg=name)
    placed = metrics(tmp_path)
    if not layout:
        assert any(line["mixed"] for line in placed)
        assert all(set(line["by_group_size"]) <= {"1", "2", "4"} for line in placed)


@pytest.mark.parametrize(
    "layout",
    [
        ["--expert-model-parallel-size", "2", "--num-microbatches", "2"],
        ["--expert-model-parallel-size", "4", "--use-distributed-optimizer"],
        ["--context-parallel-size", "2", "--use-distributed-optimizer", "--overlap-grad-reduce"],
        ["--pipeline-model-parallel-size", "2", "--tensor-model-parallel-size", "2", "--num-microbatches", "2"],
    ],
    ids=["experts", "distributed-optimizer", "replicas", "pipeline-tensor"],
)
def test_a_resumed_run_repeats_the_losses_digit_for_digit(pool, corpora, tmp_path, layout):
    argv = [
        *("--data-path", corpora[0], "--valid-data-path", corpora[1], "--output-dir", str(tmp_path)),
        *("--train-iters", "5", "--save-interval", "2", "--eval-interval", "1", "--eval-iters", "1", *layout),
    ]
    pool.run(4, train, argv, timeout=LIMIT)
    straight = losses(tmp_path)
    assert [step for step, _, _ in straight] == [1, 2, 3, 4, 5]
    checkpoints = tmp_path / "checkpoints"
    assert sorted(path.name for path in checkpoints.glob("iter_*")) == ["iter_0000004", "iter_0000005"]
    shutil.rmtree(checkpoints / "iter_0000005")
    pool.run(4, train, argv, timeout=LIMIT)
    assert losses(tmp_path)[5:] == straight[4:]
    held_out = metrics(tmp_path, "valid")
    assert held_out[-1]["loss"] == next(line["loss"] for line in held_out if line["step"] == 5)


def test_evaluation_does_not_disturb_training(pool, corpora, tmp_path):
    argv = ["--data-path", corpora[0], "--train-iters", "3"]
    pool.run(2, train, [*argv, "--output-dir", str(tmp_path / "without")], timeout=LIMIT)
    held_out = ["--valid-data-path", corpora[1], "--eval-interval", "1", "--eval-iters", "1"]
    held_out += ["--output-dir", str(tmp_path / "with")]
    pool.run(2, train, [*argv, *held_out], timeout=LIMIT)
    assert losses(tmp_path / "with") == losses(tmp_path / "without")
    assert len(metrics(tmp_path / "with", "valid")) == 4


def test_another_layout_continues_within_1e_5(pool, corpora, tmp_path):
    argv = ["--data-path", corpora[0], "--train-iters", "4", "--save-interval", "2", "--output-dir"]
    pool.run(4, train, [*argv, str(tmp_path / "four")], timeout=LIMIT)
    load = ["--load", str(tmp_path / "half")]
    shutil.copytree(tmp_path / "four" / "checkpoints" / "iter_0000002", tmp_path / "half" / "iter_0000002")
    pool.run(2, train, [*argv, str(tmp_path / "two"), *load], timeout=LIMIT)
    assert losses(tmp_path / "two") == [pytest.approx(line, rel=1e-5) for line in losses(tmp_path / "four")[2:]]
    for extra, message in (
        (["--expert-model-parallel-size", "2"], "optimizer state does not move between 1 and more"),
        (["--use-distributed-optimizer"], "does not move between a sharded optimizer and a whole one"),
        (["--hidden-size", "64"], "has hidden_size 32, this run 64"),
        (["--seed", "7"], "--seed 1234"),
    ):
        with pytest.raises(CaseFailed, match=message):
            pool.run(2, train, [*argv, str(tmp_path / "x"), *load, *extra], timeout=LIMIT)
    finetuned = [*argv, str(tmp_path / "fine"), *load, "--expert-model-parallel-size", "2", "--finetune"]
    pool.run(2, train, [*finetuned, "--train-iters", "1", "--lr-warmup-iters", "0"], timeout=LIMIT)
    assert losses(tmp_path / "fine")[0][1] < losses(tmp_path / "four")[0][1]


def test_a_run_without_checkpoints_to_load_says_so(pool, corpora, tmp_path):
    argv = ["--data-path", corpora[0], "--output-dir", str(tmp_path), "--load", str(tmp_path)]
    with pytest.raises(CaseFailed, match="holds no whole checkpoint"):
        pool.run(1, train, argv, timeout=LIMIT)


def test_only_whole_checkpoints_count(tmp_path):
    assert newest(tmp_path) is None
    for name, whole in (("iter_0000002", True), ("iter_0000009", False), (".partial_iter_0000010", True)):
        (tmp_path / name).mkdir()
        if whole:
            (tmp_path / name / "megaring.json").write_text(json.dumps({"iteration": 2}))
    (tmp_path / "iter_x").mkdir()
    assert newest(tmp_path) == tmp_path / "iter_0000002"
