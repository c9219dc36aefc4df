"""The cost model: equation 10 on the paper's own parameters, equations 4 and 7, and loads counted by hand."""

from dataclasses import replace

import numpy as np
import pytest
from rollout_shapes import NO_ORACLE, ORACLE, QWEN3, V2_LITE, V3, balanced

from megaring.rollout.blocks import History, PageTable
from megaring.rollout.calibration import Constants
from megaring.rollout.cost import (
    Batch,
    Stages,
    dop_exchange_bytes,
    exposed_transfer,
    step_stages,
    transfer_seconds,
)
from megaring.rollout.feed_forward import FeedForward
from megaring.rollout.layout import CP, DOP, DP, LAYOUTS, TP
from megaring.rollout.manifest import make_manifest

needs_oracle = pytest.mark.skipif(ORACLE is None, reason=NO_ORACLE)
# Rates of 1 so that every term of a step is its load; no latency that matters.
UNIT = Constants(1.0, 1.0, 1.0, 1.0, 1.0, 1.0)


def law(x):
    """Equation 11 as terms of equation 10: what is in the last bracket is R - eta t_att."""
    core = 0.05 * x + 1.2 * x / (x + 8)
    return {
        "TP": Stages(0, 0, 0.40, 0.25 * x, 0, 0, exchange=0.15, overlap=0.25),
        "DP": Stages(0, 0, 2.45, core, 0, 0, exchange=0.0),
        "CP": Stages(0, 0, 2.55, 0.05 * x, 0, 0, exchange=3.40, overlap=0.5),
        "DOP": Stages(0, 0, 0.45, core, 0, 0, exchange=4.80, overlap=0.35),
    }


def fastest(thousands, alpha):
    costs = law(thousands / alpha)
    return min(costs, key=lambda name: costs[name].seconds)


@needs_oracle
@pytest.mark.parametrize("scenario", ["DCU", "H200", "B200"])
def test_crossovers_of_the_papers_law(scenario):
    oracle = ORACLE["cost_model_crossovers_k"]
    alpha, order = oracle[scenario]["alpha"], oracle["order"]
    for first, second, at in zip(order[:-1], order[1:], oracle[scenario]["crossovers"], strict=True):
        low, high = at - 1, at + 1
        assert (fastest(low, alpha), fastest(high, alpha)) == (first, second)
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (middle, high) if fastest(middle, alpha) == first else (low, middle)
        assert low == pytest.approx(at, abs=5e-4)


def test_a_step_adds_dependent_stages_and_hides_only_what_is_budgeted():
    stages = Stages(1, 2, 3, 5, 4, 7, exchange=11, overlap=0.5)
    assert (stages.projection, stages.attention) == (3, 5)
    assert stages.seconds == 1 + 3 + 5 + 7 + (11 - 0.5 * 5)
    assert replace(stages, exchange=2).seconds == 1 + 3 + 5 + 7


@needs_oracle
def test_dop_exchange_is_equation_4():
    oracle = ORACLE["dop_exchange_bytes"]
    assert dop_exchange_bytes(V3, 8, 1) == oracle["deepseek_v3_bf16_T8_per_row_kib"] * 1024
    assert dop_exchange_bytes(V3, 8, 256) == oracle["N256_mib"] * 2**20


@needs_oracle
def test_exposed_transfers():
    for case in ORACLE["exposed_transfer_ms"]:
        transfer, compute = [case["transfer"]] * case["layers"], [case["compute"]] * case["layers"]
        assert exposed_transfer(transfer, compute) == case["exposed"]
        if "blocking" in case:
            assert sum(transfer) == case["blocking"]


def test_the_first_transfer_can_hide_under_the_step_before():
    assert exposed_transfer([3.8] * 4, [30] * 4, early=90) == 0
    assert exposed_transfer([3.8] * 4, [30] * 4, early=1) == pytest.approx(2.8)
    assert exposed_transfer([40] * 4, [30] * 4, early=90) == 30
    assert exposed_transfer([5, 7, 9], [6, 1, 100]) == 5 + 1 + 8  # each behind the layer before it
    assert exposed_transfer([], []) == 0
    with pytest.raises(ValueError, match="2 transfers and 1 computations"):
        exposed_transfer([1, 2], [1])


@pytest.mark.parametrize(("requests", "ranks"), [(16, 8), (13, 4), (1, 4)])
def test_loads_of_the_busiest_rank_are_table_2(requests, ranks):
    batch = Batch.equal(requests, 4096, 1, ranks)
    whole = {name: step_stages(V3, layout, ranks, batch, UNIT) for name, layout in LAYOUTS.items()}
    history = 4096 * V3.token_bytes
    work = V3.layers * 4096 * 2 * 128 * (576 + 512)
    owned = -(-requests // ranks)
    assert whole["TP"].attention_read == requests * history
    assert whole["CP"].attention_read == pytest.approx(requests * history / ranks)
    assert whole["DP"].attention_read == whole["DOP"].attention_read == owned * history
    assert whole["TP"].attention_compute == whole["CP"].attention_compute == pytest.approx(requests * work / ranks)
    assert whole["DP"].attention_compute == whole["DOP"].attention_compute == owned * work
    for name, share in (("TP", ranks), ("DOP", ranks), ("DP", 1), ("CP", 1)):
        assert whole[name].projection_read == pytest.approx(V3.projection_bytes / share)


def test_gqa_reads_its_own_heads_under_tp():
    batch = Batch.equal(8, 1024, 1, 8)
    reads = {t: step_stages(QWEN3, TP, t, batch, UNIT).attention_read for t in (2, 4, 8)}
    assert reads[2] == 2 * reads[4] == 2 * reads[8]  # 4 KV heads: 8 ranks read no less than 4


def test_causal_chunks_count_their_pairs():
    one = Batch(np.array([0]), np.array([100]), np.array([4]))
    compute = step_stages(V2_LITE, DP, 2, one, UNIT).attention_compute
    pairs = sum(97 + i for i in range(4))
    assert compute == V2_LITE.layers * pairs * 2 * 16 * (576 + 512)


def test_rows_through_the_projections():
    mixed = Batch(np.array([0, 1, 1]), np.array([500, 500, 500]), np.array([1, 1, 256]))
    shape, matrices = QWEN3, 2 * QWEN3.layers * sum(each.elements for each in QWEN3.projections)
    done = {name: step_stages(shape, layout, 4, mixed, UNIT).projection_compute for name, layout in LAYOUTS.items()}
    assert done["TP"] == done["DOP"] == 258 * matrices / 4
    assert done["DP"] == 257 * matrices  # the owner's
    assert done["CP"] == (2 + 256 / 4) * matrices  # decode rows everywhere, the chunk in four parts


def test_exchange_counted_by_hand():
    batch = Batch.equal(8, 1024, 1, 4)
    layers, row = QWEN3.layers, 2048 * 2
    received = {name: step_stages(QWEN3, layout, 4, batch, UNIT).exchange for name, layout in LAYOUTS.items()}
    assert received["DP"] == layers * 6 * row  # the rows of the three others
    assert received["TP"] == 2 * received["DP"]
    queries_and_results = 2 * 24 * 128 * 2 * 2  # of 2 rows, the heads of the three others
    new_kv = 2 * 3 * (2 * 128 * 2)
    assert received["DOP"] == layers * (queries_and_results + new_kv) + received["TP"]
    partials = 6 * 32 * 129 * 2
    assert received["CP"] == layers * partials + received["DP"]
    latency = {name: step_stages(QWEN3, layout, 4, batch, UNIT).latency for name, layout in LAYOUTS.items()}
    assert latency == {"TP": layers, "DP": layers, "CP": 2 * layers, "DOP": 3 * layers}
    chunk = step_stages(QWEN3, CP, 4, Batch(np.array([0]), np.array([64]), np.array([8])), UNIT)
    assert chunk.latency == 3 * layers  # its queries are gathered first
    assert chunk.exchange == received["CP"] + layers * 6 * 32 * 128 * 2
    alone = step_stages(QWEN3, DOP, 1, Batch.equal(8, 1024, 1, 1), UNIT)
    assert (alone.exchange, alone.latency) == (0, 0)


def test_uneven_owners_make_the_busiest_one_count():
    uneven = Batch(np.array([0, 0, 0, 1]), np.array([1000, 1000, 1000, 5]), np.ones(4, int))
    dp, cp = (step_stages(V2_LITE, layout, 4, uneven, UNIT) for layout in (DP, CP))
    assert dp.attention_read == 3000 * V2_LITE.token_bytes
    assert cp.attention_read == pytest.approx(3005 / 4 * V2_LITE.token_bytes)


def test_the_rest_of_the_model_is_the_same_in_every_layout():
    shape = replace(QWEN3, feed_forward=FeedForward(6144, 0, 128, 8, 768, vocab=151936))
    batch = Batch.equal(8, 1024, 1, 4)
    fixed = {step_stages(shape, layout, 4, batch, UNIT).fixed for layout in LAYOUTS.values()}
    assert len(fixed) == 1
    assert fixed.pop() > step_stages(QWEN3, TP, 4, batch, UNIT).fixed


def test_empty_batches_cost_the_overhead_only():
    none = Batch(*(np.zeros(0, int),) * 3)
    for layout in LAYOUTS.values():
        assert step_stages(V3, layout, 4, none, replace(UNIT, step_overhead=0.5)).seconds == 0.5


@pytest.mark.parametrize(
    ("owner", "context", "rows"), [([0], [4], [0]), ([0], [4], [5]), ([0, 1], [4], [1])], ids=["none", "more", "uneven"]
)
def test_bad_batches_are_refused(owner, context, rows):
    with pytest.raises(ValueError, match=r"rows|row counts"):
        Batch(np.array(owner), np.array(context), np.array(rows))


def test_transfers_take_the_busiest_ranks_bytes():
    manifest = make_manifest(V2_LITE, DOP, CP, balanced(4, 4, 3))
    bandwidth = replace(UNIT, link_bandwidth=1e9, collective_latency=1e-5)
    live = 4 * 64 * 4 * 3 * V2_LITE.layer_token_bytes
    expected = 0.75 * (V2_LITE.layer_projection_bytes + live / 4) / 1e9 + 2e-5
    assert transfer_seconds(manifest, bandwidth) == pytest.approx(expected)
    assert transfer_seconds(make_manifest(V2_LITE, DP, DOP, balanced(4, 4, 3)), bandwidth) == 0


def test_the_busiest_rank_may_be_a_sender():
    table = PageTable.from_histories([History(0, 0, 64 * 8)], 4)
    manifest = make_manifest(V2_LITE, DOP, TP, table)  # one owner sends everything to three others
    bandwidth = replace(UNIT, link_bandwidth=1e9, collective_latency=0.5)
    live = 64 * 8 * V2_LITE.layer_token_bytes
    assert transfer_seconds(manifest, bandwidth) == pytest.approx(3 * live / 1e9 + 0.5)


def test_experts_visited_and_read():
    mlp = FeedForward.from_config(
        type(
            "Config",
            (),
            {
                "num_layers": 3,
                "hidden_size": 8,
                "ffn_hidden_size": 16,
                "vocab_size": 10,
                "num_experts": 4,
                "moe_router_topk": 2,
                "moe_ffn_hidden_size": 4,
                "moe_layer_freq": [0, 1, 1],
                "moe_shared_expert_intermediate_size": 6,
            },
        )()
    )
    dense, expert, shared, router, vocab = 3 * 8 * 16, 3 * 8 * 4, 3 * 8 * 6, 8 * 4, 80
    assert mlp.stored(8, 3) == dense + 2 * (4 * expert + shared + router) + 2 * vocab
    assert mlp.visited(8, 3) == dense + 2 * (2 * expert + shared + router) + vocab
    assert mlp.read(8, 3, rows=1) == mlp.visited(8, 3)  # one token reads its two experts
    assert mlp.read(8, 3, rows=10**6) == mlp.stored(8, 3) - vocab
    with pytest.raises(ValueError, match="moe_layer_freq has 1 entries for 3 layers"):
        FeedForward.from_config(
            type("Config", (), {"num_layers": 3, "hidden_size": 8, "num_experts": 4, "moe_layer_freq": [1]})()
        )
