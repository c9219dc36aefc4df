"""Draws against exact probabilities that are worked out here with Python floats, and rows that are no distribution."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from megaring.rollout.sampling import Draw, sample, token_logprobs, transform

LOGITS = [1.0, -0.5, 2.0, 2.0, 0.3, -3.0, 1.0]
DOUBLES = torch.tensor([LOGITS, LOGITS[::-1]], dtype=torch.float64)


def exact(logits, temperature=1.0, top_k=0, top_p=1.0, banned=()):
    """Probabilities after the transforms, by the definition in words."""
    weights = {i: math.exp(x / temperature) for i, x in enumerate(logits) if i not in banned}
    ordered = sorted(weights, key=lambda i: (-weights[i], i))[: top_k or None]
    total, mass, kept = sum(weights[i] for i in ordered), 0.0, []
    for i in ordered:
        kept.append(i)
        mass += weights[i] / total
        if mass >= top_p:
            break
    total = sum(weights[i] for i in kept)
    return [weights[i] / total if i in kept else 0.0 for i in range(len(logits))]


SETTINGS = [
    {},
    {"temperature": 0.4},
    {"temperature": 2.5, "top_k": 3},
    {"top_p": 0.6},
    {"top_k": 5, "top_p": 0.8, "banned": (2,)},
    {"top_k": 1},
    {"top_p": 1e-9},
]


@pytest.mark.parametrize("settings", SETTINGS)
def test_transforms_are_exact(settings):
    found = transform(DOUBLES[:1], [Draw(0, 0, 0, **settings)]).exp()[0]
    np.testing.assert_allclose(found, exact(LOGITS, **settings), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("settings", SETTINGS[:5])
def test_draws_follow_the_exact_distribution(settings):
    """Pearson's chi-square of 20,000 draws; the bound is the 99.99 % point for 6 degrees of freedom."""
    count = 20_000
    draws = [Draw(11, i % 4, i // 4, **settings) for i in range(count)]
    tokens = [drawn.token for drawn in sample(DOUBLES[:1], [0] * count, draws)]
    expected = np.array(exact(LOGITS, **settings)) * count
    seen = np.bincount(tokens, minlength=len(LOGITS))
    possible = expected > 0
    assert (seen[~possible] == 0).all()
    assert (((seen - expected)[possible]) ** 2 / expected[possible]).sum() < 27.9


def test_both_log_probabilities():
    draw = Draw(5, 0, 3, temperature=0.7, top_k=3, alternatives=2)
    (drawn,) = sample(DOUBLES[:1], [0], [draw])
    assert drawn.logprob == pytest.approx(math.log(exact(LOGITS)[drawn.token]), abs=1e-12)
    assert drawn.sampling_logprob == pytest.approx(math.log(exact(LOGITS, 0.7, 3)[drawn.token]), abs=1e-12)
    assert {token for token, _ in drawn.alternatives} == {2, 3}
    assert drawn.alternatives[0][1] == pytest.approx(math.log(exact(LOGITS)[2]), abs=1e-12)


def test_greedy_takes_the_first_of_the_largest_that_is_not_banned():
    greedy = [Draw(0, 0, 0, temperature=0.0), Draw(0, 0, 0, temperature=0.0, banned=(2,))]
    first, second = sample(DOUBLES[:1], [0, 0], greedy)
    assert (first.token, second.token) == (2, 3)
    assert first.sampling_logprob == 0.0
    assert second.logprob == pytest.approx(math.log(exact(LOGITS)[3]), abs=1e-12)


def test_a_tiny_temperature_is_greedy_and_finite():
    (drawn,) = sample(torch.tensor([[0.0, 5.0, 4.999]]), [0], [Draw(1, 0, 0, temperature=1e-300)])
    assert drawn.token == 1
    assert drawn.sampling_logprob == pytest.approx(0.0)


def test_a_draw_does_not_depend_on_its_batch():
    random = torch.Generator().manual_seed(1)
    logits = torch.randn(20, 50, generator=random)
    draws = [Draw(i, i % 3, i, 0.8, top_k=i, top_p=1 - i / 40, alternatives=i % 5) for i in range(20)]
    together = sample(logits, range(20), draws)
    assert together == [sample(logits[i : i + 1], [0], [draws[i]])[0] for i in range(20)]
    backwards = sample(logits.flip(0), range(20), draws[::-1])
    assert backwards[::-1] == together


def test_rows_that_are_no_distribution_fail_alone():
    logits = torch.tensor([LOGITS, LOGITS, LOGITS, LOGITS, [-math.inf] * 7])
    logits[1, 4] = math.nan
    logits[2, 0] = math.inf
    draws = [Draw(0, 0, 0), Draw(0, 0, 0), Draw(0, 0, 0, temperature=0.0), Draw(0, 0, 0, banned=tuple(range(7)))]
    good, *bad = sample(logits, [0, 1, 2, 3, 4], [*draws, Draw(0, 0, 0)])
    assert good == sample(logits[:1], [0], draws[:1])[0]
    assert bad == [None] * 4


def test_prompt_log_probabilities():
    logits = DOUBLES
    found = token_logprobs(logits, [2, 0], 1)
    assert [value for value, _ in found] == pytest.approx([math.log(exact(LOGITS)[i]) for i in (2, 6)])
    assert found[0][1] == ((2, pytest.approx(math.log(exact(LOGITS)[2]))),)
