"""Microbatches through the real loader: what ranks and replicas get, resumption, evaluation, errors."""

import itertools
import json
import threading
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from buddyring import plan
from megaring.data.documents import make_sequences
from megaring.data.indexed import CorpusError
from megaring.data.loader import Evaluation, Loader, LoaderConfig
from megaring.data.sampler import Sampler
from megaring.errors import UserError

LENGTHS = np.random.default_rng(0).integers(1, 2000, size=60).tolist()
CONFIG = LoaderConfig(token_budget=4096, seed=11, vocab_size=1_000_000, ranks=4)


@pytest.fixture
def sequences(corpus_of_lengths):
    return make_sequences(corpus_of_lengths(LENGTHS), 2000, "error")


def take(sequences, config, number, state=None):
    with Loader(sequences, config, state) as loader:
        return list(itertools.islice(loader, number))


def assert_equal(one, other):
    assert one.samples == other.samples
    assert one.placement.groups == other.placement.groups
    for name in ("tokens", "labels", "loss_mask", "position_ids"):
        assert torch.equal(getattr(one, name), getattr(other, name))


def pairs(batch):
    """(token, label) of every target."""
    rows = batch.loss_mask[0].bool()
    return list(zip(batch.tokens[0, rows].tolist(), batch.labels[0, rows].tolist(), strict=True))


@pytest.mark.parametrize("rank_multiple", [1, 2])
@pytest.mark.parametrize("scheduler", ["buddyring", "uniform", "local"])
def test_ranks_together_hold_every_sequence_once(sequences, scheduler, rank_multiple):
    options = {"scheduler": scheduler, "rank_multiple": rank_multiple}
    by_rank = [take(sequences, replace(CONFIG, rank=rank, plan_options=options), 10) for rank in range(4)]
    for batches in zip(*by_rank, strict=True):
        samples = batches[0].samples
        assert all(batch.samples == samples for batch in batches)
        lengths = [LENGTHS[s] for s in samples]
        assert batches[0].placement.groups == plan(lengths, 4, **options).groups
        expected = [
            (token, token + 1)
            for s in samples
            for token in range(int(sequences[s][0]), int(sequences[s][0]) + LENGTHS[s] - 1)
        ]
        assert sorted(p for batch in batches for p in pairs(batch)) == sorted(expected)
        for rank, batch in enumerate(batches):
            assert batch.tokens.shape == (1, batch.placement.rows(rank))
            assert batch.tokens.shape[1] % rank_multiple == 0
            assert (batch.padding_mask is None) == (batch.tokens.shape[1] == batch.shards.num_tokens)
            assert batch.target_tokens == len(expected)
            assert batch.num_tokens == sum(lengths)
            assert batch.sum_squared_lengths == sum(length**2 for length in lengths)


def test_some_microbatches_mix_group_sizes(sequences):
    sizes = [{group.size for group in batch.placement.groups} for batch in take(sequences, CONFIG, 20)]
    assert any(len(size) > 1 for size in sizes)


def test_replicas_draw_in_turn(sequences):
    sampler = Sampler(sequences, 4096, 11)
    order = [tuple(sampler.draw()) for _ in range(12)]
    for replica in range(3):
        batches = take(sequences, replace(CONFIG, replicas=3, replica=replica), 4)
        assert [batch.samples for batch in batches] == order[replica::3]


@pytest.mark.parametrize("replicas", [1, 2])
def test_resumes_at_any_microbatch(sequences, replicas):
    config = replace(CONFIG, rank=2, replicas=replicas, replica=replicas - 1)
    whole = take(sequences, config, 25)
    with Loader(sequences, config) as loader:
        states = [loader.state()] + [(next(loader), loader.state())[1] for _ in range(24)]
    for step in (0, 1, 7, 24):
        state = json.loads(json.dumps(states[step]))
        for batch, expected in zip(take(sequences, config, 25 - step, state), whole[step:], strict=True):
            assert_equal(batch, expected)


def test_state_is_that_of_the_last_microbatch_given(sequences):
    sampler = Sampler(sequences, 4096, 11)
    with Loader(sequences, replace(CONFIG, prefetch=8)) as loader:
        for _ in range(6):
            assert loader.state() == sampler.state()
            next(loader)
            sampler.draw()


def test_replicas_and_ranks_have_one_state(sequences):
    states = []
    for rank, replica in ((0, 0), (3, 1)):
        with Loader(sequences, replace(CONFIG, rank=rank, replicas=2, replica=replica)) as loader:
            next(loader)
            states.append(loader.state())
    assert states[0] == states[1]


def test_state_of_another_corpus(sequences, corpus_of_lengths):
    with Loader(sequences, CONFIG) as loader:
        state = loader.state()
    other = make_sequences(corpus_of_lengths(LENGTHS[1:], name="other"), 2000, "error")
    with pytest.raises(CorpusError, match="another training order"):
        Loader(other, CONFIG, state)


def test_evaluation_is_one_epoch_and_always_the_same(sequences):
    evaluation = Evaluation(sequences, CONFIG)
    first, second = list(evaluation), list(evaluation)
    assert len(first) == len(second) == len(evaluation)
    for one, other in zip(first, second, strict=True):
        assert_equal(one, other)
    assert Counter(s for batch in first for s in batch.samples) == dict.fromkeys(range(len(LENGTHS)), 1)


def test_evaluation_is_bounded(sequences):
    evaluation = Evaluation(sequences, CONFIG, max_microbatches=3)
    assert len(evaluation) == len(list(evaluation)) == 3


def test_evaluation_does_not_disturb_training(sequences):
    expected = take(sequences, CONFIG, 6)
    evaluation = Evaluation(sequences, CONFIG, max_microbatches=2)
    with Loader(sequences, CONFIG) as loader:
        for batch in expected:
            assert_equal(next(loader), batch)
            state = loader.state()
            list(evaluation)
            assert loader.state() == state


def test_replicas_evaluate_equally_often(corpus_of_lengths):
    # Three full microbatches for two replicas: the last round leaves one of them without sequences.
    sequences = make_sequences(corpus_of_lengths([64, 64, 64]), 64, "error")
    config = LoaderConfig(token_budget=64, seed=0, vocab_size=1_000_000, ranks=2, replicas=2)
    batches = [list(Evaluation(sequences, replace(config, replica=replica))) for replica in range(2)]
    assert [len(b.samples) for b in batches[0]] == [1, 1]
    assert [len(b.samples) for b in batches[1]] == [1, 0]
    empty = batches[1][1]
    assert (empty.target_tokens, empty.loss_mask.sum().item(), empty.tokens.tolist()) == (0, 0, [[0]])
    assert sorted(s for part in batches for b in part for s in b.samples) == [0, 1, 2]


def test_abandoned_evaluation_ends_its_thread(sequences):
    iterator = iter(Evaluation(sequences, CONFIG))
    next(iterator)
    iterator.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "prefetch"]


def test_id_outside_the_vocabulary_is_named(make_corpus):
    corpus = make_corpus([[1, 2, 3], [4, 5, 600, 7], [8, 9]])
    config = LoaderConfig(token_budget=16, seed=0, vocab_size=600)
    message = r"document 1 of .*corpus\.idx holds token id 600, the model's vocabulary has 600 ids"
    with Loader(make_sequences(corpus, 16, "error"), config) as loader, pytest.raises(CorpusError, match=message):
        next(loader)
    with Loader(make_sequences(corpus, 16, "error"), replace(config, vocab_size=601)) as loader:
        assert next(loader).tokens.max() == 600


def test_only_the_rank_that_reads_a_bad_id_refuses_it(make_corpus):
    # 256 tokens on two ranks by tiles of 64: rank 1 holds positions 64 to 191, rank 0 reads the label at 64 besides.
    corpus = make_corpus([[0] * 128 + [900] + [0] * 127])
    config = LoaderConfig(256, 0, vocab_size=900, ranks=2, plan_options={"scheduler": "uniform", "tile": 64})
    with Loader(make_sequences(corpus, 256, "error"), config) as loader:
        assert next(loader).shards.num_tokens == 128
    with (
        Loader(make_sequences(corpus, 256, "error"), replace(config, rank=1)) as loader,
        pytest.raises(CorpusError, match=r"document 0 .* holds token id 900"),
    ):
        next(loader)


def test_sequence_that_no_domain_of_this_capacity_holds(sequences):
    with pytest.raises(CorpusError, match="more than a domain of 4 ranks can hold: raise --capacity"):
        Loader(sequences, replace(CONFIG, plan_options={"capacity": 400}))


def test_microbatch_that_cannot_be_placed(corpus_of_lengths):
    sequences = make_sequences(corpus_of_lengths([100] * 40), 100, "error")
    config = LoaderConfig(token_budget=1000, seed=0, vocab_size=1_000_000, ranks=2, plan_options={"capacity": 400})
    message = "a microbatch of 10 sequences and 1,000 tokens cannot be placed on 2 ranks: .*lower --token-budget"
    with Loader(sequences, config) as loader, pytest.raises(UserError, match=message):
        next(loader)


@pytest.mark.parametrize(("field", "value"), [("rank", 4), ("rank", -1), ("replica", 1)])
def test_place_must_exist(field, value):
    with pytest.raises(ValueError, match=f"{field} {value} is not one of"):
        replace(CONFIG, **{field: value})


def test_one_token_documents(corpus_of_lengths):
    sequences = make_sequences(corpus_of_lengths([1] * 30), 10, "error")
    batch = take(sequences, replace(CONFIG, token_budget=20), 1)[0]
    assert (batch.num_tokens, batch.target_tokens, batch.loss_mask.sum().item()) == (20, 0, 0)
