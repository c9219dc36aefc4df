"""Footprints, longest contexts, admission and the memory rule of a switch."""

import math
from dataclasses import replace

import pytest
from rollout_shapes import NO_ORACLE, ORACLE, QWEN3, V2_LITE, V3, balanced, random_histories

from megaring.rollout.blocks import History, PageTable
from megaring.rollout.footprint import (
    Admission,
    Sizes,
    admission,
    effective_shard_bytes,
    kv_rank_bytes,
    rank_bytes,
    switch_shortage,
)
from megaring.rollout.layout import CP, DOP, DP, LAYOUTS, SWITCHES, TP
from megaring.rollout.manifest import make_manifest

GIB = 2**30


@pytest.mark.skipif(ORACLE is None, reason=NO_ORACLE)
def test_longest_contexts_of_the_worked_example():
    case = ORACLE["capacity_example"]
    sizes = Sizes(case["projections_gib"] * GIB, case["kv_kib_per_token"] * 1024, case["ranks"])
    for name, expected in case["longest_context"].items():
        found = sizes.longest_context(LAYOUTS[name], case["memory_gib"] * GIB, case["batch"])
        assert found == pytest.approx(expected, rel=1e-12)
        full = sizes.rank_bytes(LAYOUTS[name], case["batch"], found)
        assert full == pytest.approx(case["memory_gib"] * GIB, rel=1e-12)


@pytest.mark.skipif(ORACLE is None, reason=NO_ORACLE)
def test_owners_admit_for_themselves():
    case = ORACLE["owner_admission"]
    for name, pool in case["pool_tokens_per_owner"].items():
        found = admission(LAYOUTS[name], 8, pool, case["tokens_per_request"])
        assert found == Admission(case["admitted_per_owner"][name], 8 * case["admitted_per_owner"][name])


def test_pooled_room_is_no_room_for_an_owner():
    assert admission(DP, 4, 64 * 10, 64 * 6) == Admission(1, 4)  # 4 x 4 pages are left, and none admits a fifth
    assert admission(CP, 4, 64 * 10, 64 * 6) == Admission(5, 5)  # ceil(6 / 4) = 2 pages on rank 0 each
    assert admission(TP, 4, 64 * 10, 64 * 6) == Admission(1, 1)
    assert admission(DP, 4, 64 * 10, 65) == Admission(5, 20)  # a second page for one token
    with pytest.raises(ValueError, match="at least 1"):
        admission(DP, 4, 640, 0)


def test_dop_frees_what_equation_1_says():
    sizes = Sizes.of(V3, 8)
    freed = sizes.pool_bytes(DOP, 140 * GIB) - sizes.pool_bytes(DP, 140 * GIB)
    assert freed == V3.projection_bytes * 7 / 8
    assert sizes.pool_bytes(DP, 1.0) == 0.0


def test_ratio_of_pools_on_a_v3_shaped_model_of_eight_layers():
    sizes = Sizes.of(replace(V3, layers=8), 2)
    memory = sizes.weight_bytes(DP) + 4 * GIB
    assert sizes.pool_bytes(DOP, memory) / sizes.pool_bytes(DP, memory) == pytest.approx(1.32, abs=0.005)


def test_gqa_with_enough_kv_heads_gains_nothing_from_dop():
    for ranks in (2, 4):
        sizes = Sizes.of(QWEN3, ranks)
        assert sizes.longest_context(DOP, 40 * GIB, ranks) == sizes.longest_context(TP, 40 * GIB, ranks)
    sizes = Sizes.of(QWEN3, 8)  # twice as many ranks as KV heads
    gain = sizes.longest_context(DOP, 40 * GIB, 8) / sizes.longest_context(TP, 40 * GIB, 8)
    assert gain == pytest.approx(2)


def test_busiest_owner_counts():
    sizes = Sizes(0, 1, ranks=8)
    assert [sizes.requests_on_rank(DP, requests) for requests in (1, 8, 9, 16)] == [1, 1, 2, 2]
    assert sizes.requests_on_rank(CP, 9) == 9 / 8


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("shape", [V2_LITE, V3, QWEN3], ids=lambda shape: shape.name)
def test_whole_pages_of_a_balanced_batch_are_equation_1(shape, ranks):
    table, sizes = balanced(2 * ranks, ranks, 2), Sizes.of(shape, ranks)
    for layout in LAYOUTS.values():
        expected = sizes.rank_bytes(layout, 2 * ranks, 128 * ranks)
        assert rank_bytes(shape, layout, table) == [expected] * ranks


def test_uneven_batches_count_whole_pages_and_shared_ones_once_an_owner():
    histories = [History(0, 0, 65), History(1, 0, 130, origins=(0,)), History(2, 2, 70, origins=(0,))]
    table, page = PageTable.from_histories(histories, 4), 64 * V2_LITE.token_bytes
    assert kv_rank_bytes(V2_LITE, DP, table) == [4 * page, 0, 2 * page, 0]
    assert kv_rank_bytes(V2_LITE, TP, table) == [5 * page] * 4
    assert kv_rank_bytes(V2_LITE, CP, table) == [page, 3 * page, page, 0]


def test_effective_shards_only_where_a_slice_cuts_a_group():
    assert effective_shard_bytes(QWEN3, 4) == effective_shard_bytes(V3, 8) == 0
    # 4 query heads and a whole KV head, in bf16, for each of 48 layers
    assert effective_shard_bytes(QWEN3, 8) == 48 * 2 * (4 + 2) * 128 * 2048
    assert Sizes.of(QWEN3, 8).weight_bytes(TP) > QWEN3.projection_bytes / 8


@pytest.mark.parametrize("shape", [V2_LITE, QWEN3], ids=lambda shape: shape.name)
def test_memory_rule_is_equation_5(shape):
    table = PageTable.from_histories(random_histories(3, 4), 4)
    for source, destination in SWITCHES:
        manifest = make_manifest(shape, source, destination, table)
        before, after = rank_bytes(shape, source, table), rank_bytes(shape, destination, table)
        need = max(max(before[r], after[r]) + manifest.transit_bytes(r) for r in range(4))
        assert switch_shortage(manifest, need + 1000, reserve=1000) is None
        short = switch_shortage(manifest, need + 999, reserve=1000)
        assert short.missing == 1
        assert f"rank {short.rank} would need" in str(short)
        assert switch_shortage(manifest, [need + 1000] * 3 + [0], reserve=1000).rank == 3
    with pytest.raises(ValueError, match="2 memory sizes for 4 ranks"):
        switch_shortage(manifest, [1, 2])


def test_transit_counts_the_heads_of_whole_pages_that_arrive():
    table = PageTable.from_histories([History(0, 0, 65)], 2)
    page = 64 * QWEN3.layer_token_bytes
    to_owner = make_manifest(QWEN3, TP, DOP, table)  # 2 of 4 heads arrive of both pages
    assert [to_owner.transit_bytes(rank) for rank in range(2)] == [page, 0]
    to_positions = make_manifest(QWEN3, DP, CP, table)
    assert [to_positions.transit_bytes(rank) for rank in range(2)] == [0, page]
    assert math.isclose(to_positions.received_kv_bytes(1), QWEN3.layer_token_bytes)  # one live token
