"""Page tables: what counts as one page, who holds it, and what is refused."""

import numpy as np
import pytest
from rollout_shapes import QWEN3, V3, random_histories

from megaring.rollout.blocks import History, PageTable, held_heads, held_slices
from megaring.rollout.layout import CP, DOP, DP, LAYOUTS, TP


def test_pages_of_uneven_histories():
    table = PageTable.from_histories([History(5, 1, 130), History(3, 0, 64), History(4, 0, 0)], 2)
    assert table.origin.tolist() == [3, 5, 5, 5]
    assert table.index.tolist() == [0, 0, 1, 2]
    assert table.tokens.tolist() == [64, 64, 64, 2]
    assert table.owners.tolist() == [[True, False], [False, True], [False, True], [False, True]]
    assert table.holders(TP).all()
    assert table.holders(CP)[:, 1].tolist() == [False, False, True, False]
    assert table.holders(DP) is table.holders(DOP) is table.owners


def test_shared_pages_are_listed_once():
    histories = [History(1, 0, 200), History(2, 1, 150, origins=(1, 1)), History(9, 1, 130, origins=(1, 2))]
    table = PageTable.from_histories(histories, 2)
    assert list(zip(table.origin.tolist(), table.index.tolist(), strict=True)) == [
        (1, 0),
        (1, 1),
        (1, 2),
        (1, 3),
        (2, 2),
        (9, 2),
        (2, 1),  # request 2 has no page of its own there: it is somebody's who has ended
    ]
    assert table.owners[0].tolist() == [True, True]
    assert table.owners[2].tolist() == [True, False]


def test_a_partly_filled_page_is_shared_until_somebody_appends():
    both = [History(1, 0, 70), History(2, 1, 70, origins=(1, 1))]
    assert len(PageTable.from_histories(both, 2)) == 2
    with pytest.raises(ValueError, match=r"page 1 of request 1 .* must copy it first"):
        PageTable.from_histories([History(1, 0, 71), both[1]], 2)


def test_positions_and_owners_hold_every_page_once_and_heads_every_head():
    table = PageTable.from_histories(random_histories(1, 4), 4)
    assert (table.holders(CP).sum(axis=1) == 1).all()
    for shape, copies in ((V3, 4), (QWEN3, 1)):
        heads = [head for rank in range(4) for head in held_heads(shape, TP, rank, 4)]
        assert sorted(heads) == sorted([*range(shape.cache_heads)] * copies)
        assert held_heads(shape, DOP, 2, 4) == range(shape.cache_heads)
    assert held_slices(TP, 3, 4) == range(3, 4)
    assert held_slices(CP, 3, 4) == range(4)


@pytest.mark.parametrize("seed", range(4))
def test_counts_of_held_pages(seed):
    table = PageTable.from_histories(random_histories(seed, 4), 4)
    for layout in LAYOUTS.values():
        assert table.held(layout).tolist() == table.holders(layout).sum(axis=0).tolist()


@pytest.mark.parametrize("seed", range(8))
def test_pages_are_those_of_a_list_made_one_by_one(seed):
    histories = random_histories(seed, 4)[seed % 3 :]  # without the first few, pages are shared that nobody wrote
    expected: dict[tuple[int, int], tuple[int, set[int]]] = {}
    for each in histories:
        for page, begin in enumerate(range(0, each.length, 64)):
            origin = each.origins[page] if page < len(each.origins) else each.request
            tokens, owners = expected.setdefault((origin, page), (min(64, each.length - begin), set()))
            assert tokens == min(64, each.length - begin)
            owners.add(each.owner)
    table = PageTable.from_histories(histories, 4)
    columns = zip(table.origin.tolist(), table.index.tolist(), table.tokens.tolist(), table.owners, strict=True)
    found = {(origin, index): (tokens, set(np.flatnonzero(row).tolist())) for origin, index, tokens, row in columns}
    assert len(table) == len(found)
    assert found == expected


def test_order_of_requests_does_not_matter():
    histories = random_histories(8, 4)
    first, second = (PageTable.from_histories(each, 4) for each in (histories, histories[::-1]))
    assert first.same_pages(second)
    assert np.array_equal(first.owners, second.owners)


@pytest.mark.parametrize(
    ("histories", "ranks", "said"),
    [
        ([History(0, 0, 1), History(0, 1, 1)], 2, "request 0 is listed twice"),
        ([History(0, 2, 1)], 2, "owner 2; the group has ranks 0 to 1"),
        ([History(0, 0, -1)], 2, "-1 tokens"),
        ([History(0, 0, 64, origins=(1, 1))], 2, "shares 2 pages; its 64 tokens fill 1"),
        ([History(-1, 0, 64)], 2, "its number"),
        ([], 0, "at least 1 is needed"),
    ],
)
def test_bad_histories_are_refused(histories, ranks, said):
    with pytest.raises(ValueError, match=said):
        PageTable.from_histories(histories, ranks)
