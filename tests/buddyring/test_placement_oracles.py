"""Worked placements: the paper's figure 7, zigzag deals, tails and legal sizes."""

import json
from pathlib import Path

import numpy as np
import pytest

import buddyring
from buddyring.placement import Placement
from buddyring.problem import check_problem
from buddyring.search.tables import build_tables
from buddyring.zigzag import causal_pairs, chunk_bounds, place_loads

PATH = Path(__file__).parents[2] / ".." / "shared" / "oracles" / "placement.json"
ORACLE = json.loads(PATH.read_text()) if PATH.exists() else None
pytestmark = pytest.mark.skipif(ORACLE is None, reason="the worked placements (placement.json) are not on this machine")
OPTIONS = {
    "token_tolerance": 0.10,
    "attention_tolerance": 0.05,
    "max_group": 8,
    "capacity": None,
    "rank_multiple": 1,
    "tile": 128,
    "exact_tiles": False,
    "target": None,
}


def figure7(scheduler, **options):
    return buddyring.plan(
        ORACLE["figure7"]["lengths"], ORACLE["figure7"]["ranks"], scheduler=scheduler, exact_tiles=True, **options
    )


def test_figure7_buddyring_is_one_of_the_equal_optima():
    expected, placement = ORACLE["figure7"]["buddyring"], figure7("buddyring")
    twins, middle, last = placement.groups[:2], placement.groups[2], placement.groups[3]
    assert sorted(map(list, twins)) == expected["groups"][:2]
    assert list(middle) == expected["groups"][2]
    assert last.size == 1
    assert sorted(placement.token_loads) == expected["token_loads_sorted"]
    assert placement.token_imbalance == expected["token_imbalance"]
    assert placement.attention_imbalance == pytest.approx(expected["attention_imbalance"], abs=5e-8)
    assert placement.num_shards == expected["shards"]
    assert placement.communication == expected["communication_proxy"]
    assert placement.num_distinct_groups == expected["distinct_groups"]
    assert [list(pair) for pair in placement.profile] == expected["profile"]
    assert placement.violation == 0


def test_figure7_kappa():
    problem = check_problem(ORACLE["figure7"]["lengths"], 4, **{**OPTIONS, "exact_tiles": True})
    kappa = build_tables(problem, problem.lengths).kappa()
    assert kappa == pytest.approx(ORACLE["figure7"]["kappa"], abs=5e-5)


def test_figure7_megatron_and_uniform():
    expected, placement = ORACLE["figure7"]["megatron"], figure7("megatron", target=8192)
    assert [list(group) for group in placement.groups] == expected["groups"]
    assert placement.token_imbalance == expected["token_imbalance"]
    assert placement.attention_imbalance == pytest.approx(expected["attention_imbalance"], abs=5e-7)
    assert placement.num_shards == expected["shards"]
    assert figure7("megatron").groups == placement.groups  # the default target is half of the mean
    expected, placement = ORACLE["figure7"]["uniform"], figure7("uniform")
    assert placement.num_shards == expected["shards"]
    assert (placement.token_imbalance, placement.attention_imbalance) == (0, 0)


def test_zigzag_tokens_positions_and_labels():
    for case in ORACLE["zigzag"]:
        lengths, size = case["lengths"], case["size"]
        placement = Placement.from_groups(lengths, size, [(0, size)] * len(lengths), tile=case["tile"])
        for rank, expected in case.get("ranks", {}).items():
            assert placement.shards(int(rank)).tokens.tolist() == expected
        for rank, expected in case.get("positions", {}).items():
            assert placement.shards(int(rank)).positions.tolist() == expected
        for rank, expected in case.get("labels_of_tokens_0_to_7", {}).items():
            tokens = placement.shards(int(rank)).tokens
            assert ["ignore" if token == 7 else token + 1 for token in tokens.tolist()] == expected


def test_tails():
    for case in ORACLE["tails_with_tile_1"] + ORACLE["tails_with_tile_128"]:
        if "length" not in case:
            continue
        tile = 1 if case in ORACLE["tails_with_tile_1"] else 128
        chunks = np.diff(chunk_bounds(np.array([case["length"]]), case["size"], tile)[0])
        rows = place_loads(np.array([case["length"]]), case["size"], tile)[0][0]
        assert chunks.sum() == rows.sum() == case["length"]
        if "chunks" in case:
            assert chunks.tolist() == case["chunks"]
            assert rows.tolist() == case["rows"]
        else:
            assert [chunks[0], chunks[-1]] == case["chunks_first_last"]
            assert [rows[0], rows[-1]] == case["rows_first_last"]
            placement = buddyring.plan([case["length"]], 8)
            assert placement.attention_imbalance == pytest.approx(case["attention_imbalance_alone_on_8"], abs=5e-5)


def test_work():
    expected = ORACLE["work"]["causal_16_tokens_on_2_ranks"]
    halves = causal_pairs(np.array([0, 8]), np.array([8, 16]))
    assert halves.tolist() == expected["contiguous"]
    assert place_loads(np.array([16]), 2, 1)[1][0].tolist() == expected["zigzag"]


def test_legal_sizes():
    (sizes,) = [case["legal_sizes"] for case in ORACLE["tails_with_tile_128"] if "legal_sizes" in case]
    problem = check_problem([1], 8, **OPTIONS)
    for length, expected in sizes.items():
        legal = [size for size in (1, 2, 4, 8) if problem.is_legal(np.array([int(length)]), size)[0]]
        assert legal == expected
