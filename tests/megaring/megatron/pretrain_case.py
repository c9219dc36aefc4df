"""A tiny run of the whole training path, for the pool of processes."""

import json
import multiprocessing

import numpy as np

from megaring.data.indexed import IndexedWriter
from megaring.data.record import CorpusRecord, record_path
from megaring.megatron.pretrain import pretrain
from megaring.preflight import preflight
from megaring.recipe import parse

MODEL = [
    *("--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4", "--num-query-groups", "2"),
    *("--num-experts", "4", "--moe-ffn-hidden-size", "32", "--moe-aux-loss-coeff", "0.02"),
    *("--token-budget", "2048", "--seq-length", "1536", "--lr", "1e-3", "--lr-warmup-iters", "1"),
]


def make_corpus(folder, name="corpus", documents=40, seed=0):
    """Documents of 2 to 1,536 tokens that follow a simple rule, so that a model can learn something."""
    rng = np.random.default_rng(seed)
    lengths = np.minimum(2 + rng.lognormal(5.5, 1.1, documents).astype(int), 1536)
    with IndexedWriter(folder / name, 257) as writer:
        for length in lengths:
            writer.add((rng.integers(256) + rng.integers(1, 4) * np.arange(length)) % 256)
        writer.commit()
    record = CorpusRecord(255, documents, int(lengths.sum()), int(lengths.max()), 0, 0, "byte", 257, 256, False)
    record_path(folder / name).write_text(record.to_json())
    return str(folder / name)


def train(rank, world_size, argv):
    """Run ``pretrain`` with ``argv`` on this process of the pool."""
    # The pool's workers are daemons, which may not start the processes that write checkpoints.
    multiprocessing.current_process()._config["daemon"] = False
    pretrain(preflight(parse([*MODEL, *argv]), world_size))


def metrics(folder, kind="train"):
    """The JSON lines of one kind."""
    lines = (json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == kind]


def losses(folder):
    """(step, loss, gradient norm) of every training step, as written."""
    return [(line["step"], line["loss"], line["grad_norm"]) for line in metrics(folder)]


def first_moments(rank, world_size, checkpoint):
    """Adam's first moments in a checkpoint by parameter: after one step they are 0.1 x the gradient."""
    from megatron.core.dist_checkpointing import load_plain_tensors

    tensors = load_plain_tensors(str(checkpoint))
    return {name.split("exp_avg.")[1]: value for name, value in tensors.items() if "exp_avg." in name}
