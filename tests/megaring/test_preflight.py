import subprocess
import sys

import numpy as np
import pytest

from megaring.data.indexed import IndexedWriter
from megaring.data.record import CorpusRecord, record_path
from megaring.errors import UserError
from megaring.preflight import preflight
from megaring.recipe import parse

SMALL = ["--num-layers", "2", "--hidden-size", "32", "--token-budget", "1024", "--seq-length", "512"]


def corpus(folder, lengths, *, largest_id=255, vocab_size=257, record=True, name="corpus"):
    prefix = folder / name
    with IndexedWriter(prefix, vocab_size) as writer:
        for length in lengths:
            writer.add(np.full(length, largest_id))
        writer.commit()
    if record:
        made = CorpusRecord(largest_id, len(lengths), sum(lengths), max(lengths), 0, 0, "byte", vocab_size, 256, False)
        record_path(prefix).write_text(made.to_json())
    return str(prefix)


@pytest.fixture
def prefix(tmp_path):
    return corpus(tmp_path, [400, 30, 512])


def check(prefix, *argv, world_size=4):
    return preflight(parse([*SMALL, "--data-path", prefix, *argv]), world_size)


def test_what_follows_from_the_options(prefix):
    run = check(prefix)
    assert (run.domain, run.replicas, run.model.vocab_size) == (4, 1, 257)
    assert run.plan_options["capacity"] == 320  # 1.25 x 1024 / 4
    assert check(prefix, "--cp-scheduler", "uniform").plan_options["capacity"] is None
    assert check(prefix, "--context-parallel-size", "2").replicas == 2
    assert check(prefix, "--tensor-model-parallel-size", "2").domain == 2
    assert check(prefix, "--tensor-model-parallel-size", "2").plan_options["rank_multiple"] == 2


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["--seq-length", "400"], ["document 2", "512", "--overlong split"]),
        (["--seq-length", "2048"], ["--seq-length 2048 exceeds --token-budget 1024"]),
        (["--capacity", "100"], ["document 2", "capacity", "--overlong"]),
        (["--cp-scheduler", "local", "--capacity", "300"], ["document 2", "capacity"]),
        (["--context-parallel-size", "3"], ["4 ranks cannot be divided", "context 3"]),
        (["--tensor-model-parallel-size", "8"], ["4 ranks cannot be divided", "tensor 8"]),
        (["--vocab-size", "200"], ["token id 255", "--vocab-size"]),
        (["--attention-dropout", "0.1"], ["--attention-dropout"]),
        (["--window-size", "128"], ["--window-size"]),
        (["--mtp-num-layers", "1"], ["--mtp-num-layers"]),
        (["--cp-scheduler", "megatron"], ["--cp-scheduler megatron", "at most 2 ranks"]),
        (["--cp-scheduler-target", "5"], ["--cp-scheduler-target"]),
        (["--num-experts", "4", "--expert-model-parallel-size", "3"], ["--expert-model-parallel-size 3"]),
        (["--finetune"], ["--finetune", "--load"]),
        (["--wandb-exp-name", "first"], ["--wandb-exp-name", "--wandb-project"]),
        (["--output-dir", ""], ["--output-dir is empty"]),
        (["--output-dir", __file__], ["--output-dir", "is not a folder"]),
        (["--save", f"{__file__}/below"], ["--save", f"{__file__} is not a folder"]),
        (["--data-path", ""], ["prefix", "''"]),
        (["--valid-data-path", "corpus/"], ["prefix", "'corpus/'"]),
        (["--valid-data-path", "nowhere/at/all"], ["nowhere/at/all.idx does not exist"]),
    ],
)
def test_a_bad_set_up_is_refused_by_name(prefix, argv, parts):
    with pytest.raises(UserError) as caught:
        check(prefix, *argv)
    for part in parts:
        assert part in str(caught.value)


def test_an_empty_and_a_missing_corpus(tmp_path):
    prefix = corpus(tmp_path, [1])
    with IndexedWriter(prefix, 257) as writer:
        writer.commit()
    record_path(prefix).unlink()
    with pytest.raises(UserError, match="corpus is empty"):
        check(prefix, "--vocab-size", "257")
    with pytest.raises(UserError, match="--data-path is missing"):
        preflight(parse(SMALL), 4)


def test_a_corpus_without_a_record_needs_a_vocabulary_size(tmp_path):
    prefix = corpus(tmp_path, [10], record=False)
    with pytest.raises(UserError, match="give --vocab-size"):
        check(prefix)
    assert check(prefix, "--vocab-size", "300").model.vocab_size == 300


def test_nothing_heavy_is_imported(prefix):
    code = (
        "import sys; from megaring.preflight import preflight; from megaring.recipe import parse; "
        f"preflight(parse({[*SMALL, '--data-path', prefix]!r}), 4); print({{'torch', 'megatron'}} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "set()", done.stderr
