"""Properties of every plan, over drawn lengths."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import buddyring
from buddyring import CapacityError, plan

LENGTHS = st.lists(st.one_of(st.integers(1, 600), st.integers(1, 9000), st.integers(1, 40_000)), max_size=14)
RANKS = st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16])
SCHEDULER = st.sampled_from(list(buddyring.SCHEDULERS))
MANY = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)


def held_tokens(placement):
    """The tokens of each rank, as indices into the concatenated sequences."""
    return [placement.shards(rank).tokens for rank in range(placement.ranks)]


@MANY
@given(lengths=LENGTHS, ranks=RANKS, scheduler=SCHEDULER, tile=st.sampled_from([1, 16, 128]))
def test_every_token_is_held_once(lengths, ranks, scheduler, tile):
    placement = plan(lengths, ranks, scheduler=scheduler, tile=tile)
    held = held_tokens(placement)
    assert np.array_equal(np.sort(np.concatenate(held)), np.arange(sum(lengths)))
    assert [len(tokens) for tokens in held] == list(placement.token_loads)
    assert sum(placement.attention_loads) == sum(x * (x + 1) // 2 for x in lengths)


@MANY
@given(lengths=LENGTHS, ranks=RANKS, max_group=st.sampled_from([1, 2, 4, 8]), exact_tiles=st.booleans())
def test_buddyring_groups_are_legal(lengths, ranks, max_group, exact_tiles):
    placement = plan(lengths, ranks, max_group=max_group, exact_tiles=exact_tiles)
    assert placement.aligned
    for length, (start, size) in zip(lengths, placement.groups, strict=True):
        assert size <= max_group
        assert size & (size - 1) == 0
        assert ranks % size == 0
        assert start % size == 0
        assert size == 1 or (length % (256 * size) == 0 if exact_tiles else -(-length // 128) >= 2 * size)


@MANY
@given(
    lengths=LENGTHS,
    ranks=RANKS,
    slack=st.floats(1.0, 1.6),
    multiple=st.sampled_from([1, 16, 128]),
    scheduler=st.sampled_from(["buddyring", "uniform"]),
)
def test_capacity_is_kept_or_refused(lengths, ranks, slack, multiple, scheduler):
    capacity = max(multiple, int(sum(lengths) / ranks * slack))
    try:
        placement = plan(lengths, ranks, scheduler=scheduler, capacity=capacity, rank_multiple=multiple)
    except CapacityError:
        free = plan(lengths, ranks, scheduler=scheduler, rank_multiple=multiple)
        assert max(free.rows(rank) for rank in range(ranks)) > capacity
    else:
        assert max(placement.rows(rank) for rank in range(ranks)) <= capacity


@MANY
@given(lengths=LENGTHS, ranks=RANKS, data=st.data())
def test_order_of_the_input_does_not_matter(lengths, ranks, data):
    permuted = data.draw(st.permutations(lengths))
    before, after = plan(lengths, ranks), plan(permuted, ranks)
    assert after.violation == before.violation
    assert after.profile == before.profile
    assert after.communication == pytest.approx(before.communication, rel=1e-12)
    assert after.num_distinct_groups == before.num_distinct_groups
    assert after.attention_imbalance == before.attention_imbalance
    assert after.token_imbalance == before.token_imbalance


@MANY
@given(lengths=LENGTHS, ranks=RANKS)
def test_never_more_violation_than_the_baselines(lengths, ranks):
    """Of the placements that BuddyRing may make too: local ones, and uniform ones that split by tiles."""
    found = plan(lengths, ranks)
    assert found.violation <= plan(lengths, ranks, scheduler="local").violation + 1e-9
