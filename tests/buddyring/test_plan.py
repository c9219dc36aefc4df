"""The call itself: what it takes, what it refuses and how, and that it always gives the same plan."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import buddyring
from buddyring import CapacityError, plan
from buddyring.distributions import batch

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("scheduler", buddyring.SCHEDULERS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24])
def test_every_scheduler_for_any_number_of_ranks(scheduler, ranks):
    lengths = [30000, 9000, 9000, 4000, 2500, 1200, 700, 128, 17, 1]
    placement = plan(lengths, ranks, scheduler=scheduler)
    assert placement.lengths == tuple(lengths)
    assert placement.scheduler == scheduler
    assert sum(placement.token_loads) == sum(lengths)
    assert sum(placement.attention_loads) == sum(x * (x + 1) // 2 for x in lengths)
    if scheduler != "megatron":
        assert placement.aligned
        assert all(size & -size == size and ranks % size == 0 for _, size in placement.groups)
    if scheduler == "local":
        assert placement.num_shards == len(lengths)


@pytest.mark.parametrize("scheduler", buddyring.SCHEDULERS)
def test_trivial_steps(scheduler):
    empty = plan([], 8, scheduler=scheduler)
    assert (empty.token_imbalance, empty.attention_imbalance, empty.violation, empty.groups) == (0, 0, 0, ())
    assert [len(empty.shards(rank).tokens) for rank in range(8)] == [0] * 8
    assert sum(plan([1], 8, scheduler=scheduler).token_loads) == 1
    assert sum(plan([5] * 3, 8, scheduler=scheduler).token_loads) == 15
    many = plan([1] * 4000, 8, scheduler=scheduler)
    if scheduler == "megatron":  # its groups grow onto idle ranks, whatever the load
        assert sum(many.token_loads) == 4000
    else:
        assert many.token_loads == (500,) * 8


def test_giants():
    assert plan([131073], 8).token_imbalance < 1e-3
    assert plan([131073], 8).attention_imbalance < 0.014
    assert plan([2**31 - 1], 8).violation == 0
    with pytest.raises(ValueError, match=r"rank 0 would hold 4294967294 tokens.*plan more ranks"):
        plan([2**31 - 1] * 2, 1)


def test_lengths_come_from_any_iterable_of_integers():
    expected = plan([5000, 300], 2).groups
    assert plan(iter([5000, 300]), 2).groups == expected
    assert plan(np.array([5000, 300], dtype=np.uint16), np.int64(2)).groups == expected
    assert plan((np.int32(5000), 300), 2).groups == expected


@pytest.mark.parametrize(
    ("lengths", "error", "words"),
    [
        ([5, 0], ValueError, "length 1 is 0"),
        ([-3], ValueError, "length 0 is -3"),
        ([True], TypeError, "length 0 is True"),
        ([2.0], TypeError, r"length 0 is 2\.0"),
        ([math.nan], TypeError, "length 0 is nan"),
        (["12"], TypeError, "length 0 is '12'"),
        ("12", TypeError, "string"),
        (5, TypeError, "iterable of integers"),
        (np.array([1.5]), TypeError, "float64"),
        (np.array([True]), TypeError, "bool"),
        (np.array([[1]]), TypeError, "one-dimensional"),
        ([2**31], ValueError, "the most is 2147483647"),
    ],
)
@pytest.mark.parametrize("scheduler", ["buddyring", "local"])
def test_bad_lengths_are_refused_by_name(lengths, error, words, scheduler):
    with pytest.raises(error, match=words):
        plan(lengths, 4, scheduler=scheduler)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"ranks": 0}, ValueError, "ranks is 0; give at least 1"),
        ({"ranks": -8}, ValueError, "ranks is -8"),
        ({"ranks": 8.0}, TypeError, r"ranks is 8\.0 \(float\)"),
        ({"ranks": 2**20 + 1}, ValueError, "ranks is 1048577; give at most 1048576"),
        ({"tile": 2**64}, ValueError, "tile is 18446744073709551616; give at most 2147483647"),
        ({"rank_multiple": 2**64}, ValueError, "rank_multiple is 18446744073709551616; give at most"),
        ({"max_group": 2**31}, ValueError, "max_group is 2147483648; give at most"),
        ({"ranks": True}, TypeError, "ranks is True"),
        ({"max_group": 0}, ValueError, "max_group is 0"),
        ({"capacity": 0}, ValueError, "capacity is 0"),
        ({"capacity": "1K"}, TypeError, "capacity is '1K'"),
        ({"rank_multiple": 0}, ValueError, "rank_multiple is 0"),
        ({"capacity": 100, "rank_multiple": 128}, ValueError, "holds no multiple of rank_multiple 128"),
        ({"tile": 0}, ValueError, "tile is 0"),
        ({"token_tolerance": -0.1}, ValueError, r"token_tolerance is -0\.1"),
        ({"attention_tolerance": math.nan}, ValueError, "attention_tolerance is nan"),
        ({"attention_tolerance": "5%"}, TypeError, "attention_tolerance is '5%'"),
        ({"exact_tiles": 1}, TypeError, "exact_tiles is 1; give True or False"),
        ({"target": 8192}, ValueError, "target is an option of the megatron scheduler"),
        ({"scheduler": "megatron", "target": 0}, ValueError, "target is 0 tokens per rank"),
        ({"scheduler": "budyring"}, ValueError, "did you mean 'buddyring'"),
        ({"scheduler": "Megatron-LM"}, ValueError, "did you mean 'megatron'"),
        ({"scheduler": None}, ValueError, "no scheduler None"),
    ],
)
def test_bad_options_are_refused_by_name(options, error, words):
    with pytest.raises(error, match=words):
        plan([1000], **{"ranks": 8, **options})


def test_max_group_binds_buddyring():
    lengths = [40000, 3000, 2000]
    for most, largest in [(1, 1), (2, 2), (3, 2), (4, 4), (8, 8), (64, 16)]:
        assert max(size for _, size in plan(lengths, 16, max_group=most).groups) == largest


def test_uniform_uses_all_ranks_whatever_max_group_says():
    placement = plan([40000, 20, 3], 16, scheduler="uniform", max_group=2)
    assert [size for _, size in placement.groups] == [16, 8, 1]
    assert [size for _, size in plan([40000, 1536], 12, scheduler="uniform", exact_tiles=True).groups] == [1, 2]


def test_local_goes_longest_first_to_the_least_work():
    assert [start for start, _ in plan([100, 900, 500, 500], 2, scheduler="local").groups] == [1, 0, 1, 1]


def test_megatron_can_come_out_misaligned_and_says_so():
    placement = plan([14, 59, 29, 31, 55, 64, 26, 21, 28], 8, scheduler="megatron", target=16)
    assert (2, 4) in placement.groups
    assert not placement.aligned
    assert any("misaligned" in note and "start 2, size 4" in note for note in placement.notes)


def test_megatron_clamps_a_need_above_the_ranks():
    placement = plan([100_000], 4, scheduler="megatron", target=1000)
    assert placement.groups == ((0, 4),)
    assert any("clamped" in note for note in placement.notes)


def test_megatron_gives_short_sequences_only_ranks_that_they_have_tokens_for():
    placement = plan([5], 8, scheduler="megatron")
    assert placement.groups == ((0, 2),)
    assert any("too few tokens" in note for note in placement.notes)


def test_zeppelin_splits_long_sequences_by_squared_length():
    placement = plan([40000, 20000, 2000, 2000, 2000, 2000], 8, scheduler="zeppelin", capacity=16000)
    sizes = [size for _, size in placement.groups]
    assert sizes == [8, 2, 1, 1, 1, 1]  # shares of 8 ranks: 6.4 and 1.6
    assert max(placement.token_loads) <= 16000


@pytest.mark.parametrize("scheduler", ["local", "uniform", "megatron", "zeppelin"])
def test_baselines_are_refused_over_capacity(scheduler):
    with pytest.raises(CapacityError, match="over the capacity of 1000"):
        plan([5000, 5000, 100], 2, scheduler=scheduler, capacity=1000)


PRINT_PLANS = """
import buddyring
from buddyring.distributions import batch
for name in ("arxiv", "github"):
    for ranks in (6, 8):
        print(buddyring.plan(batch(name, 16384 * ranks), ranks).to_json())
print(buddyring.plan([6000, 5000, 4000, 900] * 2, 4, capacity=8600, rank_multiple=16).to_json())
"""


def test_eight_processes_plan_the_same_bytes():
    plan(batch("arxiv", 4096), 4)  # compiled and cached before the others need it
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PRINT_PLANS],
            env={**os.environ, "PYTHONHASHSEED": str(seed), "OMP_NUM_THREADS": "1"},
            cwd=ROOT,
            stdout=subprocess.PIPE,
        )
        for seed in range(8)
    ]
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * 8
    assert len(outputs[0].splitlines()) == 5
    assert outputs == [outputs[0]] * 8


def test_import_loads_neither_numba_nor_torch():
    code = (
        "import sys, buddyring; buddyring.plan([9, 9], 2, scheduler='local');"
        "print('numba' in sys.modules, 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT, check=True
    )
    assert done.stdout.split() == ["False", "False"]


def test_json_round_trip():
    placement = plan([5000, 300, 20000], 4)
    again = buddyring.Placement.from_json(placement.to_json())
    assert again.to_json() == placement.to_json()
    assert again.groups == placement.groups


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("ranks", value) for value in (None, 0, 4.0, 10**30)),
        *(("groups", value) for value in ([[0.9, 1.9]], [["0", "1"]], [[0]], 7)),
        *(("tile", value) for value in (0, [1], 10**30)),
        *(("rank_multiple", value) for value in (0, [[1]], 1.5)),
        *(("token_tolerance", value) for value in (-1, None, math.nan, math.inf)),
        *[("capacity", "1K"), ("exact_tiles", 1), ("scheduler", 3), ("notes", "note"), ("notes", [1])],
        *[("token_loads", [1]), ("attention_loads", None)],
    ],
)
def test_an_edited_placement_is_refused(name, value):
    data = json.loads(plan([5000], 4).to_json())
    with pytest.raises(ValueError):
        buddyring.Placement.from_json(json.dumps({**data, name: value}))


def test_text_that_is_no_placement_is_refused():
    for text in ("", "[]", "3", "null", "{", "{}", "[" * 100_000):
        with pytest.raises(ValueError, match="not a placement"):
            buddyring.Placement.from_json(text)
