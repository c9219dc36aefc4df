"""The executors that the fused kernel is compared with, on CPUs."""

import functools
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from attention_cases import CASES, gather_rows, make_inputs, oracle, place_rows, relative_error

import megaring
from buddyring import Placement
from megaring.kernels.checks import executors
from megaring.kernels.checks.gather import gather_attention, gather_gradients


def ends_together(q, k, v, segments, causal, scale):
    """A packed call whose causal mask ends at the last query and key of a segment, in fp64."""
    outs, row, key = [], 0, 0
    for queries, keys in zip(segments.lengths_q, segments.lengths_k, strict=True):
        part, keys_here, values = (
            x.double() for x in (q[row : row + queries], k[key : key + keys], v[key : key + keys])
        )
        ratio = q.shape[1] // k.shape[1]
        scores = torch.einsum("qhd,khd->hqk", part, keys_here.repeat_interleave(ratio, 1)) * scale
        assert causal
        hidden = torch.ones(queries, keys, dtype=torch.bool).triu(keys - queries + 1)
        scores = scores.masked_fill(hidden, float("-inf"))
        outs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), values.repeat_interleave(ratio, 1)))
        row, key = row + queries, key + keys
    return torch.cat(outs).to(q.dtype), None


def differentiated(dout, q, k, v, out, lse, segments, causal, scale, deterministic):
    """Its gradients, by autograd."""
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    made, _ = ends_together(*leaves, segments, causal, scale)
    assert out.shape == made.shape and lse is None and not deterministic
    return torch.autograd.grad(made, leaves, dout.double())


KERNEL = SimpleNamespace(forward=ends_together, backward=differentiated)


def gathered(rank, world_size, case, inputs):
    shards = megaring.to_device(case.placement().shards(rank), "cpu")
    q, k, v, gradient = (place_rows(x, shards.shards) for x in inputs.tensors())
    group = dist.group.WORLD if world_size > 1 else None
    out, lse = gather_attention(q, k, v, shards, group, KERNEL)
    return out, *gather_gradients(gradient, q, k, v, out, lse, shards, group, KERNEL)


@pytest.mark.parametrize("name", CASES)
def test_gather_attends_to_whole_sequences_and_differentiates(pool, name):
    case = CASES[name]
    inputs = make_inputs(sum(case.lengths), (4, 2), 8, torch.float64)
    made = pool.run(case.ranks, gathered, case, inputs)
    out, _, *gradients = oracle(inputs, case.lengths)
    for parts, expected in zip(zip(*made, strict=True), (out, *gradients), strict=True):
        assert relative_error(gather_rows(case, parts), expected) < 1e-12


LENGTHS = (90, 33, 20, 7)
QUERY_HEADS, KV_HEADS = 4, 1  # of 32 and 8, to save time
PLACEMENTS = {
    "mixed": Placement.from_groups(LENGTHS, 2, [(0, 2), (1, 1), (0, 2), (0, 1)], tile=4),
    "split": Placement.from_groups(LENGTHS, 2, [(0, 2)] * 4, tile=4),
}


def compared(rank, world_size, spoil, backward):
    """Differences of executors and placements from the reference backend on one placement."""
    device = torch.device("cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executors, "QUERY_HEADS", QUERY_HEADS)
        patch.setattr(executors, "KV_HEADS", KV_HEADS)
        patch.setattr(executors, "local_kernel", lambda q: KERNEL)
        patch.setitem(executors.RUN, "fused", functools.partial(executors._attention, "reference"))
        patch.setitem(executors.DIFFERENTIATE, "fused", functools.partial(executors._attention_backward, "reference"))
        if spoil:
            patch.setitem(executors.RUN, "gather", lambda q, k, v, shards: q.roll(1, dims=1))
            patch.setitem(executors.DIFFERENTIATE, "gather", lambda q, k, v, gradient, shards: lambda: (q, v, k))
        first, error = executors.placed("0", "fused", PLACEMENTS["mixed"], rank, device, backward=backward)
        assert not error and first.difference == 0.0
        found = {}
        for executor in ("fused", "ring", "gather"):
            for name, placement in PLACEMENTS.items():
                made, _ = executors.placed(name, executor, placement, rank, device, first, backward=backward)
                found[executor, name] = made.difference
                assert made.contender.flops == executors.forward_flops(LENGTHS) * (2.5 if backward else 1)
                heads = QUERY_HEADS + 2 * KV_HEADS if backward else QUERY_HEADS
                assert made.output.shape[1:] == (heads, 128)
                made.contender.run()  # again, as a race does
        return found


@pytest.mark.parametrize("backward", [False, True])
def test_executors_and_placements_of_a_batch_give_the_same(pool, backward):
    limit = executors.GRADIENT_DIFFERENCE_LIMIT if backward else executors.DIFFERENCE_LIMIT
    for found in pool.run(2, compared, False, backward):
        assert all(difference < limit for difference in found.values())
        assert found["fused", "mixed"] == 0.0


@pytest.mark.parametrize("backward", [False, True])
def test_a_wrong_executor_differs(pool, backward):
    limit = executors.GRADIENT_DIFFERENCE_LIMIT if backward else executors.DIFFERENCE_LIMIT
    for found in pool.run(2, compared, True, backward):
        assert {name for (name, _), difference in found.items() if difference > limit} == {"gather"}


def test_an_executor_that_refuses_says_why():
    placement = Placement.from_groups([20], 1, [(0, 1)])
    for backward in (False, True):
        made, error = executors.placed("0", "fused", placement, 0, torch.device("cpu"), backward=backward)
        assert made is None and "it needs a Hopper GPU" in error
