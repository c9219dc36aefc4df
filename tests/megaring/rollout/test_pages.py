"""Units, block tables, paged attention and the ledger, in one process and against plain ways to do the same."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megaring.rollout.arena import Arena, OutOfUnits
from megaring.rollout.attention.paged import attend, merge
from megaring.rollout.attention.segments import Segment, Segments
from megaring.rollout.layout import CP, DOP, TP
from megaring.rollout.ledger import Ledger
from megaring.rollout.pages import EntryShape, Pages

CPU = torch.device("cpu")


def units(*numbers):
    return np.array(numbers, np.int64)


def test_the_lowest_free_units_are_given_out():
    arena = Arena(6, 16, CPU)
    assert arena.take(3).tolist() == [0, 1, 2]
    arena.give_back(units(1))
    arena.claim(units(5))
    assert arena.take(2).tolist() == [1, 3]
    assert (arena.free, arena.used, arena.peak) == (1, 5, 5)
    assert arena.pages_in(np.arange(6)).tolist() == [0, 1, 2, 3]
    with pytest.raises(OutOfUnits, match="2 units of 16 bytes are wanted, 1 of 6 free"):
        arena.take(2)
    arena.give_back(units(5))
    assert arena.take(2).tolist() == [4, 5]


def test_units_have_one_user():
    arena = Arena(4, 16, CPU)
    arena.take(2)
    with pytest.raises(RuntimeError, match="in use were claimed"):
        arena.claim(units(1))
    arena.give_back(units(0))
    with pytest.raises(RuntimeError, match="free already"):
        arena.give_back(units(0))


def filled(dtype, tokens, entry):
    """Random keys and values ``[planes, heads, tokens, width]``, and the same in pages that lie in no order."""
    torch.manual_seed(1)
    cached = torch.randn(entry.planes, entry.heads, tokens, entry.width, dtype=torch.float64).to(dtype)
    arena = Arena(64, entry.unit_bytes(dtype), CPU)
    pages = Pages(arena, entry, 2, dtype)
    slots = np.random.default_rng(0).permutation(-(-tokens // 64))
    pages.reserve_slots(len(slots))
    pages.allocate(1, slots[::-1], range(entry.groups))
    at = np.arange(tokens)
    pages.append(1, slots[at // 64], at % 64, range(entry.groups), cached.permute(2, 0, 1, 3))
    return cached, pages, slots


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("planes", [1, 2])
def test_attention_over_pages(dtype, planes):
    """A chunk of 5 tokens at the end of 200, against a plain softmax; whole, and in parts merged by LSE."""
    entry = EntryShape(planes, 4, 8, 2, 8)
    cached, pages, slots = filled(dtype, 200, entry)
    queries = torch.randn(5, 12, 8, dtype=torch.float64).to(dtype)
    keys, values = (cached[plane].double().repeat_interleave(3, dim=0) for plane in (0, -1))
    scores = torch.einsum("nhd,hmd->nhm", queries.double(), keys) * 0.3
    scores.masked_fill_(torch.arange(200) > torch.arange(195, 200)[:, None, None], float("-inf"))
    expected = torch.einsum("nhm,hmd->nhd", scores.softmax(dim=-1), values)
    tolerance = 1e-13 if dtype == torch.float64 else 1e-5

    def part(indices):
        segment = Segment(slice(0, 5), 195, slots[indices], np.array(indices, np.int64), 200)
        return attend(queries, pages, 1, range(2), Segments([segment]), scale=0.3)

    out, lse = part([0, 1, 2, 3])
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=tolerance)
    torch.testing.assert_close(lse.double(), scores.logsumexp(dim=-1), rtol=0, atol=tolerance)
    parts = [part([0, 2]), part([]), part([1, 3])]
    assert (parts[1][0] == 0).all()
    assert (parts[1][1] == float("-inf")).all()
    merged = merge(*(torch.stack(each) for each in zip(*parts, strict=True)))
    torch.testing.assert_close(merged.double(), expected, rtol=0, atol=tolerance)


def test_keys_of_a_page_that_are_later_than_a_query_are_not_seen():
    """Rank 1 of 2 has page 1, all of it later than the first query of a chunk that crosses into it."""
    _, pages, slots = filled(torch.float64, 70, EntryShape(2, 2, 8, 1, 8))
    segment = Segment(slice(0, 10), 60, slots[1:2], np.array([1]), 70)
    out, lse = attend(torch.randn(10, 2, 8, dtype=torch.float64), pages, 1, range(1), Segments([segment]), scale=1.0)
    assert (lse[:4] == float("-inf")).all()
    assert (out[:4] == 0).all()
    assert lse[4:].isfinite().all()


def test_pages_move_out_of_the_way_with_their_content():
    _, pages, slots = filled(torch.float64, 200, EntryShape(2, 4, 8, 2, 8))
    before = pages.read(1, slots, range(2), 200).clone()
    pages.evacuate(units(0, 3, 7, 20))
    assert not set(pages.table[1].ravel()) & {0, 3, 7, 20}
    assert (pages.read(1, slots, range(2), 200) == before).all()


def test_a_shared_page_is_copied_by_whoever_appends_first():
    ledger = Ledger(2)
    ledger.append(1, 0, 100)
    ledger.fork(2, 1, 100)
    assert ledger.slots(1).tolist() == ledger.slots(2).tolist()
    assert ledger.new_pages(2, 0, 1, TP).tolist() == [1, 1]
    ledger.append(2, 0, 1)
    first, second = ledger.slots(1), ledger.slots(2)
    assert ledger.copies == [(first[1], second[1])]
    assert first[0] == second[0]
    ledger.append(1, 0, 1)
    assert len(ledger.copies) == 1
    assert ledger.pages_held(DOP).tolist() == [3, 0]
    ledger.move(2, 1)
    assert ledger.pages_held(DOP).tolist() == [2, 2]
    assert ledger.pages_held(CP).tolist() == [1, 2]
    assert ledger.pages_held(TP, without=(1,)).tolist() == [2, 2]


def test_a_fork_in_the_middle_of_a_page_gets_its_own_copy():
    ledger = Ledger(1)
    ledger.append(1, 0, 100)
    ledger.fork(2, 1, 70)
    first, second = ledger.slots(1), ledger.slots(2)
    assert first[0] == second[0]
    assert ledger.copies == [(first[1], second[1])]
    ledger.fork(3, 1, 64)
    assert ledger.slots(3).tolist() == [first[0]]


def test_slots_are_used_again_when_all_ranks_have_followed():
    ledger = Ledger(1)
    ledger.append(1, 0, 130)
    old = ledger.slots(1)
    ledger.release(1)
    ledger.append(2, 0, 64)
    assert not set(ledger.slots(2)) & set(old)
    ledger.settle()
    ledger.append(3, 0, 192)
    assert set(old) <= set(ledger.slots(3))


@pytest.mark.parametrize("planes", [1, 2])
def test_single_tokens_together_are_as_alone(planes):
    """Requests of different lengths, some pages elsewhere, and NaN wherever no token lies."""
    torch.manual_seed(2)
    entry, lengths = EntryShape(planes, 4, 8, 2, 8), (1, 64, 65, 190, 300, 420)
    arena = Arena(128, entry.unit_bytes(torch.float64), CPU)
    arena.bytes.view(torch.float64).fill_(float("nan"))
    pages, first = Pages(arena, entry, 1, torch.float64), 0
    pages.reserve_slots(32)
    queries, singles, alone = torch.randn(len(lengths), 4, 8, dtype=torch.float64), [], []
    for row, length in enumerate(lengths):
        slots = np.arange(first, first := first + -(-length // 64))
        pages.allocate(0, slots, range(2))
        at = np.arange(length)
        pages.append(0, slots[at // 64], at % 64, range(2), torch.randn(length, planes, 4, 8, dtype=torch.float64))
        indices = np.arange(row % 2, len(slots), 1 + row % 2)
        singles.append(Segment(slice(row, row + 1), length - 1, slots[indices], indices, length))
        # A chunk that ends in the same token takes the other way through the code.
        pair = torch.cat((torch.zeros(1, 4, 8, dtype=torch.float64), queries[row : row + 1]))
        chunk = Segment(slice(0, 2), length - 2, slots[indices], indices, length)
        alone.append([part[1] for part in attend(pair, pages, 0, range(2), Segments([chunk]), scale=0.5)])
    out, lse = attend(queries, pages, 0, range(2), Segments(singles), scale=0.5)
    torch.testing.assert_close(out, torch.stack([each[0] for each in alone]), rtol=0, atol=1e-13)
    torch.testing.assert_close(lse, torch.stack([each[1] for each in alone]), rtol=0, atol=1e-13)
    assert not out.isnan().any()
