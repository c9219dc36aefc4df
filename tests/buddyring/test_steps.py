import numpy as np
import pytest

from buddyring.distributions import batch, stdlib_lengths
from buddyring.steps import fit_length, split_steps


def test_first_fit_takes_what_fits_and_the_rest_comes_first_in_the_next():
    assert split_steps([6, 7, 3, 1, 4], 10) == [[0, 2, 3], [1], [4]]
    assert split_steps([6, 7, 3, 1, 4], 10, window=1) == [[0], [1, 2], [3, 4]]


@pytest.mark.parametrize("window", [1, 2, 64])
def test_every_sequence_once_and_no_step_over_its_budget(window):
    lengths = batch("github", 500_000)
    steps = split_steps(lengths, 100_000, window)
    assert sorted(i for step in steps for i in step) == list(range(len(lengths)))
    assert max(sum(lengths[i] for i in step) for step in steps) <= 100_000
    assert all(steps)


def test_nothing_waits_longer_than_the_window_lets_it():
    # The oldest waiting sequence always fits an empty step, so it is in the next step at the latest.
    lengths = [9] * 3 + [1] * 40 + [10] * 3
    steps = split_steps(lengths, 10, window=4)
    first = {i: number for number, step in enumerate(steps) for i in step}
    assert [first[0], first[1], first[2]] == [0, 1, 2]


def test_the_window_fills_steps_far_better_than_order_alone():
    lengths = fit_length(np.random.default_rng(0).permutation(stdlib_lengths()), 16384, "split")
    fill = {w: np.mean([lengths[s].sum() for s in split_steps(lengths, 16384, w)[:-1]]) / 16384 for w in (1, 64)}
    assert fill[64] > 0.97 > 0.9 > fill[1]


def test_the_same_steps_as_the_training_loader_draws():
    from megaring.data.sampler import Sampler

    class Corpus:
        lengths = np.asarray(batch("freelaw", 600_000))

        def __len__(self):
            return len(self.lengths)

    sampler = Sampler(Corpus(), 100_000, seed=3, epochs=1)
    order = sampler._order.tolist()
    mine = [[order[i] for i in step] for step in split_steps(Corpus.lengths[order], 100_000)]
    assert mine == [sampler.draw() for _ in mine] and sampler.draw() == []


def test_a_sequence_over_the_budget_is_named():
    with pytest.raises(ValueError, match="sequence 1 has 11 tokens, over the budget of 10"):
        split_steps([3, 11], 10)


def test_no_sequences_no_steps():
    assert split_steps([], 10) == []


@pytest.mark.parametrize(
    ("overlong", "expected"), [("truncate", [4, 4, 4, 1]), ("split", [4, 4, 1, 4, 4, 4, 1])], ids=str
)
def test_overlong(overlong, expected):
    assert fit_length(np.asarray([4, 5, 12, 1]), 4, overlong).tolist() == expected


def test_overlong_error_names_the_first():
    with pytest.raises(ValueError, match=r"sequence 1 has 5 tokens, over the 4 of one sequence \(2 of 4 are longer\)"):
        fit_length(np.asarray([4, 5, 12, 1]), 4, "error")
    assert fit_length(np.asarray([4, 1]), 4, "error").tolist() == [4, 1]
    with pytest.raises(ValueError, match="unknown overlong policy 'drop'"):
        fit_length(np.asarray([4, 1]), 4, "drop")
