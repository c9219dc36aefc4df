"""The ring's plan, replayed with token names instead of numbers: every causal pair meets exactly once."""

from collections import Counter

import numpy as np
import pytest
import torch
from attention_cases import CASES
from hypothesis import given, settings
from hypothesis import strategies as st

import megaring
from buddyring import Placement
from megaring.backends.ring_plan import build_ring_plan


def plans(placement, causal):
    return [
        megaring.to_device(placement.shards(rank), "cpu").derive(build_ring_plan, causal)
        for rank in range(placement.ranks)
    ]


def part_rows(tokens, half, part, plan):
    """Names of the rows that ``part`` selects."""
    split = tokens[: plan.split_rows]
    return (split[half.numpy()] if part.half else split)[: part.rows]


def segment_pairs(queries, keys, segments, causal):
    """All (query, key) names of one local call."""
    assert len(queries) == sum(segments.lengths_q) and len(keys) == sum(segments.lengths_k)
    assert segments.max_q == max(segments.lengths_q, default=0)
    assert segments.max_k == max(segments.lengths_k, default=0)
    for lengths, bounds in ((segments.lengths_q, segments.cu_q), (segments.lengths_k, segments.cu_k)):
        assert bounds.dtype == torch.int32 and bounds.tolist() == np.cumsum([0, *lengths]).tolist()
    for i in range(len(segments.lengths_q)):
        own_q = queries[segments.cu_q[i] : segments.cu_q[i + 1]]
        own_k = keys[segments.cu_k[i] : segments.cu_k[i + 1]]
        for row, query in enumerate(own_q):
            yield from ((int(query), int(key)) for key in (own_k[: row + 1] if causal else own_k))


def met_pairs(placement, causal):
    """How often each (query, key) pair meets, over all ranks; checks that both sides of an exchange agree."""
    made = plans(placement, causal)
    met = Counter()
    for rank, plan in enumerate(made):
        tokens = placement.shards(rank).tokens
        met.update(segment_pairs(tokens, tokens, plan.local, causal))
        for number, step in enumerate(plan.steps):
            assert step.peer == rank ^ (number + 1)
            partner = made[step.peer]
            theirs = partner.steps[number]
            assert theirs.peer == rank
            keys = part_rows(placement.shards(step.peer).tokens, partner.fronts, theirs.sent, partner)
            assert step.received_rows == theirs.sent.rows == len(keys) > 0
            queries = part_rows(tokens, plan.backs, step.queries, plan)
            met.update(segment_pairs(queries, keys, step.segments, causal=False))
    return met


def wanted_pairs(placement, causal):
    wanted, first = Counter(), 0
    for length in placement.lengths:
        for i in range(length):
            wanted.update((first + i, first + j) for j in range(i + 1 if causal else length))
        first += length
    return wanted


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_every_pair_meets_exactly_once(name, causal):
    placement = CASES[name].placement()
    assert met_pairs(placement, causal) == wanted_pairs(placement, causal)


@st.composite
def placements(draw):
    ranks = draw(st.sampled_from([1, 2, 3, 4, 6, 8, 12]))
    sizes = [size for size in (1, 2, 4, 8) if ranks % size == 0]
    lengths, groups = [], []
    for _ in range(draw(st.integers(0, 6))):
        size = draw(st.sampled_from(sizes))
        lengths.append(draw(st.integers(2 * size if size > 1 else 1, 40)))
        groups.append((size * draw(st.integers(0, ranks // size - 1)), size))
    return Placement.from_groups(lengths, ranks, groups, tile=draw(st.sampled_from([1, 2, 128])))


@given(placement=placements(), causal=st.booleans())
@settings(max_examples=60, deadline=None)
def test_every_pair_of_any_aligned_placement_meets_exactly_once(placement, causal):
    assert met_pairs(placement, causal) == wanted_pairs(placement, causal)


def test_fronts_alone_travel_to_higher_ranks():
    """A zigzag ring that sent whole shards both ways would move 4/3 of this."""
    placement = Placement.from_groups([64], 4, [(0, 4)], tile=1)
    sent = [[step.sent.rows for step in plan.steps] for plan in plans(placement, True)]
    assert sent == [[8, 8, 8], [16, 8, 8], [8, 16, 16], [16, 16, 16]]
    assert [[step.sent.rows for step in plan.steps] for plan in plans(placement, False)] == [[16, 16, 16]] * 4


def test_a_plan_is_built_once_for_all_layers():
    shards = CASES["4 ranks, mixed"].placement().shards(1)
    on_device = megaring.to_device(shards, "cpu")
    assert megaring.to_device(shards, torch.device("cpu")) is on_device
    assert megaring.to_device(on_device, "cpu") is on_device
    assert on_device.derive(build_ring_plan, True) is on_device.derive(build_ring_plan, True)
    assert on_device.derive(build_ring_plan, True) is not on_device.derive(build_ring_plan, False)
    assert on_device.tokens.tolist() == shards.tokens.tolist()
    assert on_device.positions.tolist() == shards.positions.tolist()
    assert on_device.cu_seqlens.tolist() == shards.cu_seqlens.tolist()
    assert (on_device.tokens.dtype, on_device.cu_seqlens.dtype) == (torch.int64, torch.int32)
    with pytest.raises(TypeError, match=r"shards must be a buddyring\.Shards"):
        megaring.to_device("shards", "cpu")
