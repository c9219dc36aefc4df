"""Manifests against the design's closed forms, the paper's table of switches, and sets of (token, head) cells."""

import os
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from rollout_shapes import NO_ORACLE, ORACLE, QWEN3, V2_LITE, V3, balanced, random_histories

from megaring.rollout.blocks import History, PageTable, held_slices, rebalanced
from megaring.rollout.format import StateFormat
from megaring.rollout.layout import CP, DOP, DP, LAYOUTS, SWITCHES, TP
from megaring.rollout.manifest import make_manifest, primitives

GQA = [replace(QWEN3, name=f"gqa{heads}", kv_heads=heads) for heads in (1, 2, 4, 8)]
PAIRS = [pytest.param(a, b, id=f"{a}-{b}") for a, b in SWITCHES]


def cells(shape, layout, histories, ranks, rank):
    """What ``rank`` holds, token by token and head by head, from the definitions of the layouts alone."""
    queries = range(rank * shape.query_heads // ranks, (rank + 1) * shape.query_heads // ranks)
    attended = {query * shape.cache_heads // shape.query_heads for query in queries}  # by this rank's query heads
    made = set()
    for history in histories:
        for position, head in product(range(history.length), range(shape.cache_heads)):
            page = position // 64
            origin = history.origins[page] if page < len(history.origins) else history.request
            holds = {"heads": head in attended, "positions": page % ranks == rank, "owners": history.owner == rank}
            if holds[layout.history]:
                made.add((origin, position, head))
    return made


def moved(manifest, transfers):
    """The cells that a list of transfers carries, as a list: repeated ones stay repeated."""
    table = manifest.before
    return [
        (int(table.origin[page]), int(64 * table.index[page] + token), head)
        for each in transfers
        for page in each.pages
        for token in range(table.tokens[page])
        for head in each.heads
    ]


@pytest.mark.skipif(ORACLE is None, reason=NO_ORACLE)
@pytest.mark.parametrize(("source", "destination"), PAIRS)
def test_mla_follows_the_table_of_switches(source, destination):
    found = primitives(V3, source, destination, 8)
    expected = ORACLE["switches"][f"{source}->{destination}"]
    assert list(found) == expected
    assert len(ORACLE["switches"]) - 1 == len(SWITCHES) == 12


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("shape", [V2_LITE, *GQA], ids=lambda shape: shape.name)
def test_balanced_bytes_are_the_closed_forms(shape, ranks):
    table = balanced(2 * ranks, ranks, 3)
    h = min(ranks, shape.cache_heads)
    size, live = shape.layer_projection_bytes, int(table.tokens.sum()) * shape.layer_token_bytes
    for source, destination in SWITCHES:
        manifest = make_manifest(shape, source, destination, table)
        weights = size * (ranks - 1) / ranks if source.sharded_projections > destination.sharded_projections else 0
        if source.history == destination.history:
            kv = 0
        elif destination is TP:
            kv = (1 - 1 / ranks) * live / h
        elif source is TP:
            kv = (1 - 1 / h) * live / ranks
        else:
            kv = (1 - 1 / ranks) * live / ranks
        for rank in range(ranks):
            assert manifest.received_weight_bytes(rank) == weights
            assert manifest.received_kv_bytes(rank) == kv
            sent = sum(each.bytes for part in manifest.sends(rank) for each in part)
            assert sent == weights + kv  # nobody sends more than his share
        assert manifest.layer_bytes == ranks * (weights + kv)
        assert manifest.total_bytes == shape.layers * manifest.layer_bytes
        assert (manifest.kv in ("keep", "discard")) == (kv == 0)


@pytest.mark.skipif(ORACLE is None, reason=NO_ORACLE)
def test_weights_of_deepseek_v3():
    oracle = ORACLE["deepseek_v3_projection_mib_bf16"]
    manifest = make_manifest(V3, TP, DP, balanced(8, 8, 1))
    assert manifest.received_weight_bytes(3) == oracle["received_per_rank_T8"] * 2**20
    assert sum(map(manifest.received_weight_bytes, range(8))) == oracle["received_group_T8"] * 2**20
    fp8 = make_manifest(replace(V3, weight_bytes=1), DOP, CP, balanced(8, 8, 1))
    assert fp8.received_weight_bytes(0) == oracle["received_per_rank_T8_fp8"] * 2**20


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("shape", [replace(V2_LITE, name="mla"), *GQA[:3]], ids=lambda shape: shape.name)
def test_every_needed_cell_is_kept_or_received_once(shape, ranks):
    for seed in range(3):
        histories = random_histories(seed, ranks)
        table = PageTable.from_histories(histories, ranks)
        held = {
            (layout.name, rank): cells(shape, layout, histories, ranks, rank)
            for layout, rank in product(LAYOUTS.values(), range(ranks))
        }
        for source, destination in SWITCHES:
            manifest = make_manifest(shape, source, destination, table)
            for rank in range(ranks):
                had, needed = held[source.name, rank], held[destination.name, rank]
                received = moved(manifest, manifest.receives(rank)[1])
                assert len(received) == len(set(received))
                assert set(received) == needed - had
                assert manifest.received_kv_bytes(rank) == len(needed - had) * shape.cache_head_bytes
                assert manifest.freed_kv_bytes(rank) == len(had - needed) * shape.cache_head_bytes
                for each in manifest.sends(rank)[1]:
                    assert set(moved(manifest, [each])) <= had
                    assert each.destination != rank
                pages = manifest.pages[rank]
                kept = {
                    (int(table.origin[p]), int(64 * table.index[p] + t), head)
                    for p in pages.kept
                    for t in range(table.tokens[p])
                    for head in pages.heads
                }
                assert kept == had & needed
                assert not set(pages.freed.tolist()) & set(pages.kept.tolist())


@pytest.mark.parametrize(("source", "destination"), PAIRS)
def test_every_slice_of_the_weights_is_kept_or_received_once(source, destination):
    manifest = make_manifest(QWEN3, source, destination, balanced(4, 4, 1))
    for rank in range(4):
        had, needed = set(held_slices(source, rank, 4)), set(held_slices(destination, rank, 4))
        received = [each.slice for each in manifest.receives(rank)[0]]
        assert sorted(received) == sorted(needed - had)
        assert manifest.freed_weight_bytes(rank) == len(had - needed) * QWEN3.layer_projection_bytes // 4
        for each in manifest.sends(rank)[0]:
            assert each.slice in had


def test_several_copies_of_a_page_merge_into_the_lowest_ranks():
    histories = [History(1, 2, 128), History(2, 1, 200, origins=(1, 1)), History(3, 3, 64, origins=(1,))]
    table = PageTable.from_histories(histories, 4)
    assert len(table) == 4  # two shared pages, two that only request 2 has
    manifest = make_manifest(V2_LITE, DOP, TP, table)
    for rank in range(4):
        for each in manifest.receives(rank)[1]:
            for page in each.pages:
                assert each.source == 1  # it owns request 2, whose pages include the shared ones
                assert rank not in np.flatnonzero(table.owners[page])
    spread = make_manifest(V2_LITE, TP, DP, table)
    assert [len(pages.kept) for pages in spread.pages] == [0, 4, 2, 1]  # one copy for every owner that needs it


def test_empty_batches_move_weights_only():
    table = PageTable.from_histories([], 4)
    for source, destination in SWITCHES:
        manifest = make_manifest(V2_LITE, source, destination, table)
        assert not manifest.kv_transfers
        assert manifest.kv == primitives(V2_LITE, source, destination, 4)[1]


def test_one_rank_moves_nothing():
    table = balanced(3, 1, 2)
    for source, destination in SWITCHES:
        manifest = make_manifest(QWEN3, source, destination, table)
        assert (manifest.weights, manifest.kv, manifest.total_bytes) == ("keep", "keep", 0)


def test_requests_rebalance_on_the_way_or_in_place():
    histories = [History(i, 0, 64 * (i + 1)) for i in range(4)]
    before = PageTable.from_histories(histories, 2)
    after = PageTable.from_histories(rebalanced(histories, {3: 1}), 2)
    in_place = make_manifest(V2_LITE, DP, DP, before, after)
    assert (in_place.weights, in_place.kv) == ("keep", "all_to_all")
    assert in_place.received_kv_bytes(1) == in_place.freed_kv_bytes(0) == 256 * V2_LITE.layer_token_bytes
    on_the_way = make_manifest(V2_LITE, DP, DOP, before, after)
    assert (on_the_way.weights, on_the_way.kv) == ("discard", "all_to_all")
    assert make_manifest(V2_LITE, DP, DOP, before).kv == "keep"
    assert make_manifest(V2_LITE, CP, CP, before, after).kv == "keep"  # nobody owns anything there
    with pytest.raises(KeyError, match="9"):
        rebalanced(histories, {9: 0})


def test_pages_that_differ_are_refused():
    before = PageTable.from_histories([History(0, 0, 65)], 2)
    after = PageTable.from_histories([History(0, 1, 64)], 2)
    with pytest.raises(ValueError, match="neither adds nor drops"):
        make_manifest(V2_LITE, DP, DOP, before, after)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("weight_precision", "float8_e4m3fn"),
        ("kv_precision", "float8_e4m3fn"),
        ("weight_scales", "block 128"),
        ("kv_scales", "per tensor 1f2e"),
        ("position_convention", "rotary, from the left padding"),
    ],
)
def test_another_format_is_refused_by_the_name_of_the_field(field, value):
    other = replace(StateFormat(), **{field: value})
    with pytest.raises(ValueError, match=field) as caught:
        make_manifest(V2_LITE, TP, DOP, balanced(2, 2, 1), source_format=StateFormat(), destination_format=other)
    assert value in str(caught.value)
    same = make_manifest(V2_LITE, TP, DOP, balanced(2, 2, 1), source_format=other)
    assert same.digest != make_manifest(V2_LITE, TP, DOP, balanced(2, 2, 1)).digest


def test_digest_says_whether_ranks_agree():
    histories = random_histories(5, 4)
    reference = make_manifest(QWEN3, DP, CP, PageTable.from_histories(histories, 4)).digest
    assert reference == make_manifest(QWEN3, DP, CP, PageTable.from_histories(histories[::-1], 4)).digest
    longer = [replace(histories[0], length=histories[0].length + 1), *histories[1:]]
    owner = [replace(histories[1], owner=(histories[1].owner + 1) % 4), *histories[:1], *histories[2:]]
    others = [
        make_manifest(QWEN3, DP, CP, PageTable.from_histories(longer, 4)),
        make_manifest(QWEN3, DP, CP, PageTable.from_histories(owner, 4)),
        make_manifest(QWEN3, DP, TP, PageTable.from_histories(histories, 4)),
        make_manifest(QWEN3, DOP, CP, PageTable.from_histories(histories, 4)),
        make_manifest(replace(QWEN3, layers=47), DP, CP, PageTable.from_histories(histories, 4)),
    ]
    assert len({reference, *(each.digest for each in others)}) == 6
    before, after = PageTable.from_histories(histories, 4), PageTable.from_histories(owner, 4)
    assert make_manifest(QWEN3, DP, CP, before, after).digest != reference  # equal transfers, other owners afterwards


def test_digest_is_the_same_in_another_process():
    code = (
        "from rollout_shapes import *; from megaring.rollout.manifest import *; from megaring.rollout.layout import *;"
        "print(make_manifest(V3, DOP, CP, PageTable.from_histories(random_histories(7, 4), 4)).digest)"
    )
    path = str(Path(__file__).parent)
    made = {
        subprocess.run(
            [sys.executable, "-c", f"import sys; sys.path.insert(0, {path!r}); {code}"],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
        for seed in ("1", "2")
    }
    expected = make_manifest(V3, DOP, CP, PageTable.from_histories(random_histories(7, 4), 4)).digest
    assert made == {expected + "\n"}
