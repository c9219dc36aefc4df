from itertools import pairwise

import numpy as np
import pytest
from emulation import deliver, poisoned
from test_forward_plan import CASES, HEAD_DIM, KV_HEADS, QUERY_HEADS, dense, placement

from megaring.kernels.backward_plan import QUERY_TILE, plan_backward, task_order
from megaring.kernels.forward_plan import TILE

SCALE = 0.3


def pairs(q, k):
    """``[h, q, k]``: every query with every key."""
    return q.transpose(1, 0, 2) @ k.transpose(1, 2, 0)


def over_keys(weights, rows):
    """``[q, h, d]``."""
    return (weights @ rows.transpose(1, 0, 2)).transpose(1, 0, 2)


def over_queries(weights, rows):
    """``[k, h, d]``."""
    return (weights.transpose(0, 2, 1) @ rows.transpose(1, 0, 2)).transpose(1, 0, 2)


def dense_gradients(q, k, v, gradient, causal):
    """dQ, dK and dV of attention over one whole sequence, in fp64."""
    ratio = q.shape[1] // k.shape[1]
    out, lse = dense(q, k, v, SCALE, causal)
    keys, values = k.repeat(ratio, axis=1), v.repeat(ratio, axis=1)
    p = np.exp(pairs(q, keys) * SCALE - lse.T[:, :, None])
    if causal:
        p = np.tril(p)
    slopes = p * (pairs(gradient, values) - (gradient * out).sum(2).T[:, :, None]) * SCALE
    grouped = [over_queries(left, right) for left, right in ((slopes, q), (p, gradient))]
    dk, dv = (each.reshape(len(k), k.shape[1], ratio, -1).sum(2) for each in grouped)
    return over_keys(slopes, keys), dk, dv


def differentiate(plan, local, arenas, owned_sums, causal):
    """One rank's tasks as the kernel walks them: dQ, and dK and dV where a task makes them alone."""
    q, k, v, gradient, lse, delta = local
    ratio = q.shape[1] // k.shape[1]
    dq = np.zeros_like(q)
    dk, dv = poisoned(*k.shape), poisoned(*v.shape)
    for row, tokens, owner, remote, begin, end, diagonal, slot in plan.key_tasks.tolist():
        assert 0 < tokens <= TILE and begin < end
        assert row % TILE == 0 or not remote
        source_k, source_v = arenas if remote else (k, v)
        keys, values = (part[row : row + tokens].repeat(ratio, axis=1) for part in (source_k, source_v))
        key_sums, value_sums = np.zeros((2, tokens, *k.shape[1:]))
        for n, (first, rows) in enumerate(plan.query_tiles[begin:end].tolist()):
            assert 0 < rows <= QUERY_TILE
            at = slice(first, first + rows)
            p = np.exp(pairs(q[at], keys) * SCALE - lse[at].T[:, :, None])
            if causal and diagonal and n < 2:
                hidden = np.arange(tokens)[None, :] > QUERY_TILE * n + np.arange(rows)[:, None]
                p = np.where(hidden, 0.0, p)
            slopes = p * (pairs(gradient[at], values) - delta[at].T[:, :, None]) * SCALE
            dq[at] += over_keys(slopes, keys)
            for sums, left, right in ((key_sums, slopes, q[at]), (value_sums, p, gradient[at])):
                sums += over_queries(left, right).reshape(tokens, k.shape[1], ratio, -1).sum(2)
        if slot < 0:
            assert owner == plan.forward.rank and np.isnan(dk[row : row + tokens]).all()
            dk[row : row + tokens], dv[row : row + tokens] = key_sums, value_sums
        else:
            sums = owned_sums[owner]
            sums["dk"][slot, :tokens] += key_sums
            sums["dv"][slot, :tokens] += value_sums
            sums["count"][slot] += 1
    return dq, dk, dv


@pytest.mark.parametrize(("causal", "sum_all"), [(True, False), (False, False), (True, True)])
@pytest.mark.parametrize("name", CASES)
def test_walking_the_plans_differentiates_attention_over_whole_sequences(name, causal, sum_all):
    made = placement(name, rank_multiple=8)
    rng = np.random.default_rng(0)
    total = sum(made.lengths)
    q, gradient = rng.standard_normal((2, total, QUERY_HEADS, HEAD_DIM))
    k, v = rng.standard_normal((2, total, KV_HEADS, HEAD_DIM))
    lse, delta = np.empty((2, total, QUERY_HEADS))
    wanted = [np.empty_like(tensor) for tensor in (q, k, v)]
    first = 0
    for length in made.lengths:
        rows = slice(first, first + length)
        first += length
        out, lse[rows] = dense(q[rows], k[rows], v[rows], SCALE, causal)
        delta[rows] = (out * gradient[rows]).sum(axis=2)
        for whole, part in zip(wanted, dense_gradients(q[rows], k[rows], v[rows], gradient[rows], causal), strict=True):
            whole[rows] = part

    shards = [made.shards(rank) for rank in range(made.ranks)]
    plans = [plan_backward(each, causal=causal, sum_all=sum_all) for each in shards]

    def packed(tensor, each):
        out = poisoned(each.rows, *tensor.shape[1:])
        out[: each.num_tokens] = tensor[each.tokens]
        return out

    local = [[packed(tensor, each) for tensor in (q, k, v, gradient, lse, delta)] for each in shards]
    arenas = [deliver([plan.forward for plan in plans], [part[i] for part in local]) for i in (1, 2)]
    sums = [
        {**{name: np.zeros((plan.slots, TILE, KV_HEADS, HEAD_DIM)) for name in ("dk", "dv")}, "count": [0] * plan.slots}
        for plan in plans
    ]
    found = [
        differentiate(plan, part, (arenas[0][rank], arenas[1][rank]), sums, causal)
        for rank, (plan, part) in enumerate(zip(plans, local, strict=True))
    ]
    for rank, (plan, each) in enumerate(zip(plans, shards, strict=True)):
        for slot, row, tokens, contributions in plan.owned.tolist():
            assert sums[rank]["count"][slot] == contributions, "the owner would convert too early, or wait for ever"
            for gradients, name in zip(found[rank][1:], ("dk", "dv"), strict=True):
                assert np.isnan(gradients[row : row + tokens]).all()
                gradients[row : row + tokens] = sums[rank][name][slot, :tokens]
        assert sorted(plan.owned[:, 0].tolist()) == list(range(plan.slots))
        for gradients, right in zip(found[rank], wanted, strict=True):
            np.testing.assert_allclose(gradients[: each.num_tokens], right[each.tokens], rtol=1e-10, atol=1e-10)


def test_every_task_of_every_group_is_taken_once_and_the_last_ones_are_short():
    plan = plan_backward(placement("mixed groups").shards(0))
    tiles = plan.key_tasks[:, 5] - plan.key_tasks[:, 4]
    for groups, workers in ((1, 1), (3, 2), (8, 132)):
        order = task_order(plan, groups, workers)
        assert sorted(order.tolist()) == list(range(len(tiles) * groups))
        taken = tiles[order // groups].tolist()
        last = next(i for i in range(len(taken)) if sum(taken[i:]) <= max(taken) * workers)
        assert taken[last:] == sorted(taken[last:], reverse=True) and len(set(taken)) > 3
        blocks = [(int(plan.held[place // groups]), place % groups) for place in order[:last].tolist()]
        assert sum(before != after for before, after in pairwise(blocks)) == len(set(blocks)) - 1 if blocks else True
    assert task_order(plan_backward(placement("an empty rank").shards(3)), 4, 132).size == 0
