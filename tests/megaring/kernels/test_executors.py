"""The executors that the fused kernel is compared with, on CPUs."""

import functools
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from attention_cases import CASES, gather_rows, make_inputs, place_rows, relative_error, whole_attention

import megaring
from buddyring import Placement
from megaring.kernels.checks import executors
from megaring.kernels.checks.gather import gather_attention


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


KERNEL = SimpleNamespace(forward=ends_together)


def gathered(rank, world_size, case, inputs):
    shards = megaring.to_device(case.placement().shards(rank), "cpu")
    q, k, v = (place_rows(x, shards.shards) for x in inputs.tensors()[:3])
    group = dist.group.WORLD if world_size > 1 else None
    return gather_attention(q, k, v, shards, group, KERNEL)


@pytest.mark.parametrize("name", CASES)
def test_gather_attends_to_whole_sequences(pool, name):
    case = CASES[name]
    inputs = make_inputs(sum(case.lengths), (4, 2), 8, torch.float64)
    outs = pool.run(case.ranks, gathered, case, inputs)
    expected, _ = whole_attention(inputs.q, inputs.k, inputs.v, case.lengths)
    assert relative_error(gather_rows(case, outs), expected) < 1e-12


LENGTHS = (90, 33, 20, 7)
PLACEMENTS = {
    "mixed": Placement.from_groups(LENGTHS, 2, [(0, 2), (1, 1), (0, 2), (0, 1)], tile=4),
    "split": Placement.from_groups(LENGTHS, 2, [(0, 2)] * 4, tile=4),
}


def compared(rank, world_size, spoil):
    """Differences of executors and placements from the reference backend on one placement."""
    device = torch.device("cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executors, "local_kernel", lambda q: KERNEL)
        patch.setitem(executors.RUN, "fused", functools.partial(executors._attention, "reference"))
        if spoil:
            patch.setitem(executors.RUN, "gather", lambda q, k, v, shards: q.roll(1, dims=1))
        first, error = executors.placed("0", "fused", PLACEMENTS["mixed"], rank, device)
        assert not error and first.difference == 0.0
        found = {}
        for executor in ("fused", "ring", "gather"):
            for name, placement in PLACEMENTS.items():
                made, _ = executors.placed(name, executor, placement, rank, device, first)
                found[executor, name] = made.difference
                assert made.contender.flops == executors.forward_flops(LENGTHS)
        return found


def test_executors_and_placements_of_a_batch_give_the_same(pool):
    for found in pool.run(2, compared, False):
        assert all(difference < executors.DIFFERENCE_LIMIT for difference in found.values())
        assert found["fused", "mixed"] == 0.0


def test_a_wrong_executor_differs(pool):
    for found in pool.run(2, compared, True):
        assert {name for (name, _), difference in found.items() if difference > executors.DIFFERENCE_LIMIT} == {
            "gather"
        }


def test_an_executor_that_refuses_says_why():
    placement = Placement.from_groups([20], 1, [(0, 1)])
    made, error = executors.placed("0", "fused", placement, 0, torch.device("cpu"))
    assert made is None and "it needs a Hopper GPU" in error
