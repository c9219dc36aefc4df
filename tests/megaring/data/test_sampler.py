"""The global order, first-fit filling and exact resumption."""

import itertools
import json
import subprocess
import sys
import sysconfig
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaring.data.documents import make_sequences
from megaring.data.indexed import CorpusError
from megaring.data.sampler import Sampler

LENGTHS = [5, 1, 9, 3, 7, 2, 8, 4, 6, 10, 1, 3]


@pytest.fixture
def sequences(corpus_of_lengths):
    return make_sequences(corpus_of_lengths(LENGTHS), 10, "error")


def draws(sampler, number):
    return [sampler.draw() for _ in range(number)]


def epoch_order(seed, epoch):
    order = np.arange(len(LENGTHS), dtype=np.uint32)
    np.random.Generator(np.random.PCG64([seed, epoch])).shuffle(order)
    return order.tolist()


def first_fit(order, budget, window):
    """An independent statement of the rule: microbatches from an order, until it ends."""
    waiting, made = [], []
    order = list(order)
    while order or waiting:
        batch, kept = [], []
        candidates = waiting + order
        used_of_order = 0
        for place, sequence in enumerate(candidates):
            from_order = place >= len(waiting)
            full = sum(LENGTHS[s] for s in batch) == budget
            if from_order and (full or len(kept) >= window):
                break
            used_of_order += from_order
            fits = sum(LENGTHS[s] for s in [*batch, sequence]) <= budget
            (batch if fits else kept).append(sequence)
        waiting, order = kept, order[used_of_order:]
        made.append(batch)
    return made


@pytest.mark.parametrize("window", [1, 2, 64])
@pytest.mark.parametrize("budget", [10, 13, 30])
def test_one_epoch_is_first_fit_over_the_seeded_order(sequences, budget, window):
    sampler = Sampler(sequences, budget, seed=7, window=window, epochs=1)
    expected = first_fit(epoch_order(7, 0), budget, window)
    assert draws(sampler, len(expected)) == expected
    assert sorted(s for batch in expected for s in batch) == list(range(len(LENGTHS)))
    assert draws(sampler, 3) == [[], [], []]


def test_what_does_not_fit_comes_first_in_the_next(sequences):
    sampler = Sampler(sequences, 10, seed=0)
    for _ in range(50):
        left_over = sampler.state()["left_over"]
        batch = sampler.draw()
        assert sum(LENGTHS[s] for s in batch) <= 10
        if left_over:
            assert batch[0] == left_over[0]


def test_epochs_are_shuffled_anew_and_join(sequences):
    sampler = Sampler(sequences, sum(LENGTHS), seed=3)
    # The budget is one epoch's tokens, so each microbatch is one whole epoch.
    assert draws(sampler, 3) == [epoch_order(3, epoch) for epoch in range(3)]
    assert epoch_order(3, 0) != epoch_order(3, 1)
    # A microbatch also takes from the next epoch.
    sampler = Sampler(sequences, sum(LENGTHS) + LENGTHS[epoch_order(3, 1)[0]], seed=3)
    assert sampler.draw() == [*epoch_order(3, 0), epoch_order(3, 1)[0]]


def test_no_sequence_is_skipped_or_repeated_over_many_epochs(sequences):
    sampler = Sampler(sequences, 13, seed=1, window=4)
    seen = Counter(s for batch in draws(sampler, 300) for s in batch)
    seen.update(sampler.state()["left_over"])
    epoch, position = sampler.state()["epoch"], sampler.state()["next"]
    begun = epoch_order(1, epoch)[:position]
    assert epoch > 20
    assert seen == {s: epoch + (s in begun) for s in range(len(LENGTHS))}


def test_seeds_give_different_orders(sequences):
    first, other = (draws(Sampler(sequences, 13, seed=seed), 8) for seed in (0, 1))
    assert first != other
    assert first == draws(Sampler(sequences, 13, seed=0), 8)


@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=40),
    room=st.integers(0, 60),
    window=st.integers(1, 8),
    seed=st.integers(0, 2**32),
)
def test_any_epoch_is_whole_and_within_the_budget(lengths, room, window, seed):
    budget = max(lengths) + room
    sequences = make_sequences(SimpleNamespace(lengths=np.array(lengths)), max(lengths), "error")
    batches = list(iter(Sampler(sequences, budget, seed, window=window, epochs=1).draw, []))
    assert sorted(s for batch in batches for s in batch) == list(range(len(lengths)))
    totals = [sum(lengths[s] for s in batch) for batch in batches]
    assert max(totals) <= budget
    # First-fit never leaves two neighbours that would have fitted into one.
    assert all(one + other > budget for one, other in itertools.pairwise(totals))


@pytest.mark.parametrize("step", [0, 1, 3, 4, 5, 20, 57])
def test_restored_at_any_step(sequences, step):
    whole = draws(Sampler(sequences, 13, seed=5, window=3), 80)
    before = Sampler(sequences, 13, seed=5, window=3)
    draws(before, step)
    state = json.loads(json.dumps(before.state()))
    after = Sampler(sequences, 13, seed=5, window=3)
    draws(after, 2)  # wherever it stood
    after.restore(state)
    assert after.state() == state
    assert draws(after, 80 - step) == whole[step:]


def test_state_stays_small(sequences):
    sampler = Sampler(sequences, 13, seed=5, window=4)
    assert max(len(json.dumps(sampler.state())) for _ in draws(sampler, 100)) < 200


def test_restoring_another_order_is_refused(sequences, corpus_of_lengths):
    state = Sampler(sequences, 13, seed=5).state()
    with pytest.raises(CorpusError, match="saved with --seed 5, this run has --seed 6; use 5"):
        Sampler(sequences, 13, seed=6).restore(state)
    other_corpus = make_sequences(corpus_of_lengths([*LENGTHS[:-1], 4], name="other"), 10, "error")
    other_policy = make_sequences(sequences.corpus, 9, "truncate")
    for other in (other_corpus, other_policy):
        with pytest.raises(CorpusError, match="saved in another training order: resume with the same corpus"):
            Sampler(other, 13, seed=5).restore(state)
    with pytest.raises(CorpusError, match="not a saved position"):
        Sampler(sequences, 13, seed=5).restore({"epoch": 0})


def test_restoring_with_another_budget_goes_on_in_the_order(sequences):
    before = Sampler(sequences, 13, seed=5)
    seen = [s for batch in draws(before, 2) for s in batch]
    after = Sampler(sequences, sum(LENGTHS) - sum(LENGTHS[s] for s in seen), seed=5)
    after.restore(before.state())
    assert sorted(seen + after.draw()) == list(range(len(LENGTHS)))


def test_sequence_over_the_budget(sequences):
    message = (
        r"document 9 of .*corpus\.idx has 10 tokens, more than a microbatch of the whole domain .*--token-budget 9"
    )
    with pytest.raises(CorpusError, match=message):
        Sampler(sequences, 9, seed=0)


def test_bad_settings(sequences):
    with pytest.raises(ValueError, match="must be at least 1"):
        Sampler(sequences, 13, seed=0, window=0)


def test_fill_on_the_standard_library():
    """The lengths of real source files: microbatches must come out nearly full, all epochs through."""
    stdlib = Path(sysconfig.get_path("stdlib"))
    sizes = [f.stat().st_size for f in sorted(stdlib.rglob("*.py")) if "site-packages" not in f.parts]
    lengths_only = SimpleNamespace(lengths=np.array([size for size in sizes if size]))
    sequences = make_sequences(lengths_only, 4096, "split")
    sampler = Sampler(sequences, 16_384, seed=1234)
    fill = [int(sequences.lengths[sampler.draw()].sum()) / 16_384 for _ in range(1000)]
    assert np.mean(fill) >= 0.98
    assert np.mean(np.asarray(fill) >= 0.9) >= 0.99


def test_other_processes_draw_the_same(sequences):
    code = f"""
from megaring.data.documents import make_sequences
from megaring.data.indexed import IndexedCorpus
from megaring.data.sampler import Sampler
sampler = Sampler(make_sequences(IndexedCorpus({sequences.corpus.prefix!r}), 10, "error"), 13, 5)
print([sampler.draw() for _ in range(40)])
import sys
assert "torch" not in sys.modules, "drawing must not need torch"
"""
    expected = repr(draws(Sampler(sequences, 13, seed=5), 40))
    for hash_seed in ("0", "1"):
        run = subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": hash_seed}, capture_output=True, text=True, timeout=60
        )
        assert run.returncode == 0, run.stderr
        assert run.stdout.strip() == expected
