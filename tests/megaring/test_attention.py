"""What attention promises beside the numbers: isolation, arguments, graphs, waits, and what it says."""

import logging
import re
import subprocess
import sys
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from attention_cases import CASES, Case, gather_rows, make_inputs, place_rows, relative_error, run_case, whole_attention
from torch.utils.checkpoint import checkpoint

import megaring
from buddyring import Placement

BACKENDS = ("ring", "reference")
MIXED = CASES["4 ranks, mixed"]


def one_rank(lengths=(5, 9), rank_multiple=1):
    return Placement.from_groups(lengths, 1, [(0, 1)] * len(lengths), rank_multiple=rank_multiple).shards(0)


def qkv(rows, heads=(4, 2), head_dim=8, dtype=torch.float32):
    return [torch.randn(rows, count, head_dim, dtype=dtype) for count in (heads[0], heads[1], heads[1])]


# Isolation


def changed_rows(pool, backend, change):
    """Bool per token: whether anything of it differs after ``change(inputs)``, in output and in gradients."""
    before = make_inputs(sum(MIXED.lengths), (4, 2), 8, torch.float32)
    after = make_inputs(sum(MIXED.lengths), (4, 2), 8, torch.float32)
    change(after)
    runs = [pool.run(4, run_case, MIXED, inputs, {"backend": backend}) for inputs in (before, after)]
    one, two = ([gather_rows(MIXED, [values[i] for values in run]) for i in range(5)] for run in runs)
    forward = (one[0] != two[0]).flatten(1).any(1)
    backward = torch.stack([(a != b).flatten(1).any(1) for a, b in zip(one[2:], two[2:], strict=True)]).any(0)
    return forward, backward


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sequence", [0, 2, 4])
def test_a_token_changes_its_own_sequence_from_there_on_and_nothing_else(pool, backend, sequence):
    first = sum(MIXED.lengths[:sequence])
    last = first + MIXED.lengths[sequence]
    token = first + 1

    def change(inputs):
        for x in (inputs.q, inputs.k, inputs.v):
            x[token] += 1

    forward, backward = changed_rows(pool, backend, change)
    reach = torch.zeros(sum(MIXED.lengths), dtype=torch.bool)
    reach[token:last] = True
    assert torch.equal(forward, reach)
    reach[first:last] = True
    assert not (backward & ~reach).any() and backward[token:last].all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_split_sequence_is_whole(pool, backend):
    """Its token 0 reaches the last row of every other rank forward, and their gradients reach token 0."""

    def change_token_0(inputs):
        inputs.v[0] += 1

    def change_last_gradients(inputs):
        inputs.dout[last_tokens[1:]] += 1

    shards = [MIXED.placement().shards(rank) for rank in range(4)]
    last_tokens = [int(s.tokens[s.cu_seqlens[1] - 1]) for s in shards]  # of sequence 0, on each rank
    assert [int(s.sequences[0]) for s in shards] == [0] * 4
    forward, _ = changed_rows(pool, backend, change_token_0)
    assert forward[last_tokens].all()
    _, backward = changed_rows(pool, backend, change_last_gradients)
    assert backward[0]


# Graphs


def many_calls(rank, world_size, backend, recompute):
    """Calls on two placements, one feeding the next, in one graph; returns out and the gradients of the inputs."""
    cases = (MIXED, Case(4, (40, 23), ((0, 4), (2, 1))))
    made = []
    for seed, case in enumerate(cases):
        shards = case.placement().shards(rank)
        inputs = make_inputs(sum(case.lengths), (4, 4), 8, torch.float64, seed)
        q, k, v, dout = (place_rows(x, shards).requires_grad_(i < 3) for i, x in enumerate(inputs.tensors()))
        made.append((shards, q, k, v, dout))

    def layer(x, k, v, shards):
        return x + megaring.attention(x * 1.0, k, v + 0.5 * x, shards, backend=backend)

    outs = [q for _, q, *_ in made]
    for _ in range(2):  # the two placements alternate, as microbatches of a pipeline do
        for i, (shards, _, k, v, _) in enumerate(made):
            args = (outs[i], k, v, shards)
            outs[i] = checkpoint(layer, *args, use_reentrant=recompute == "reentrant") if recompute else layer(*args)
    torch.autograd.backward(outs, [dout for *_, dout in made])
    return [(out.detach(), q.grad, k.grad, v.grad) for out, (_, q, k, v, _) in zip(outs, made, strict=True)]


@pytest.mark.parametrize("recompute", [None, "non-reentrant", "reentrant"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_several_calls_in_one_graph(pool, backend, recompute):
    results = pool.run(4, many_calls, backend, recompute)
    for seed, case in enumerate((MIXED, Case(4, (40, 23), ((0, 4), (2, 1))))):
        inputs = make_inputs(sum(case.lengths), (4, 4), 8, torch.float64, seed)
        q, k, v = (x.clone().requires_grad_() for x in inputs.tensors()[:3])
        out = q
        for _ in range(2):
            out = out + whole_attention(out, k, v + 0.5 * out, case.lengths)[0]
        expected = (out.detach(), *torch.autograd.grad(out, (q, k, v), inputs.dout))
        for i, right in enumerate(expected):
            ours = gather_rows(case, [values[seed][i] for values in results])
            assert relative_error(ours, right) < 1e-12


def two_runs(rank, world_size, inputs):
    options = {"backend": "ring", "deterministic": True}
    return [run_case(rank, world_size, MIXED, inputs, options) for _ in range(2)]


def test_deterministic_runs_are_bit_equal(pool):
    for one, two in pool.run(4, two_runs, make_inputs(sum(MIXED.lengths), (4, 2), 8, torch.bfloat16)):
        assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_lse_has_no_gradient_and_double_backward_is_refused(backend):
    shards = one_rank()
    q, k, v = (x.requires_grad_() for x in qkv(14))
    out, lse = megaring.attention(q, k, v, shards, backend=backend, return_lse=True)
    assert out.requires_grad and not lse.requires_grad
    (dk,) = torch.autograd.grad(out.square().sum(), k, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dk.sum().backward()


def test_only_some_inputs_may_need_gradients():
    shards = one_rank()
    q, k, v = qkv(14)
    q2, k2, v2 = (x.clone().requires_grad_() for x in (q, k, v))
    megaring.attention(q2, k2, v2, shards).sum().backward()
    k.requires_grad_()
    megaring.attention(q, k, v, shards).sum().backward()
    assert torch.equal(k.grad, k2.grad) and q.grad is None and v.grad is None


# Rows and strides


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_may_be_the_tokens_or_the_rounded_number(backend):
    shards = one_rank((5, 8), rank_multiple=8)
    assert (shards.num_tokens, shards.rows) == (13, 16)
    q, k, v = qkv(16)
    rounded, lse = megaring.attention(q, k, v, shards, backend=backend, return_lse=True)
    exact, _ = megaring.attention(q[:13], k[:13], v[:13], shards, backend=backend, return_lse=True)
    assert rounded.shape == (16, 4, 8) and exact.shape == (13, 4, 8)
    assert torch.equal(rounded[:13], exact) and not rounded[13:].any()
    assert lse[13:].eq(float("-inf")).all() and lse[:13].isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_step_without_sequences(backend):
    shards = Placement.from_groups([], 1, []).shards(0)
    q, k, v = (x.requires_grad_() for x in qkv(1))
    out, lse = megaring.attention(q, k, v, shards, backend=backend, return_lse=True)
    out.sum().backward()
    assert not out.any() and lse.eq(float("-inf")).all()
    assert not q.grad.any() and not k.grad.any() and not v.grad.any()
    assert megaring.attention(q[:0], k[:0], v[:0], shards, backend=backend).shape == (0, 4, 8)


def strided(rank, world_size, backend):
    """The same numbers as slices of a fused projection, as transposed memory, and contiguous."""
    shards = MIXED.placement().shards(rank)
    fused = torch.randn(shards.rows, 8 * 8, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
    results = []
    for kind in ("sliced", "transposed", "contiguous"):
        leaf = fused.clone().requires_grad_()
        q, k, v = (x.unflatten(1, (-1, 8)) for x in leaf.split([32, 16, 16], dim=1))
        if kind == "transposed":
            q, k, v = (x.permute(2, 1, 0).contiguous().permute(2, 1, 0) for x in (q, k, v))
        elif kind == "contiguous":
            q, k, v = (x.contiguous() for x in (q, k, v))
        out = megaring.attention(q, k, v, shards, backend=backend)
        out.permute(2, 0, 1).contiguous().permute(1, 2, 0).square().sum().backward()
        results.append((out.detach(), leaf.grad))
    return results


@pytest.mark.parametrize("backend", BACKENDS)
def test_strided_inputs(pool, backend):
    for sliced, transposed, contiguous in pool.run(4, strided, backend):
        for other in (sliced, transposed):
            assert all(torch.allclose(a, b, rtol=0, atol=1e-13) for a, b in zip(other, contiguous, strict=True))


# Refusals


def replaced(index, value):
    tensors = qkv(14)
    tensors[index] = value
    return tensors


@pytest.mark.parametrize(
    ("tensors", "error", "message"),
    [
        (qkv(13), ValueError, "13 rows, but rank 0 holds 14 tokens in 16 rows"),
        (replaced(1, torch.randn(13, 2, 8)), ValueError, "k and v must have the same shape"),
        (replaced(0, torch.randn(16, 4, 8)), ValueError, "q has 16 rows but k and v have 14"),
        (replaced(0, torch.randn(14, 5, 8)), ValueError, "5 query heads cannot share 2 KV heads"),
        (qkv(14, (4, 0)), ValueError, "4 query heads cannot share 0 KV heads"),
        (replaced(0, torch.randn(14, 4, 16)), ValueError, "head dimension 16 but k and v have 8"),
        (qkv(14, head_dim=0), ValueError, "the head dimension is 0"),
        (replaced(0, torch.randn(1, 14, 4, 8)), ValueError, "q must have shape"),
        (replaced(2, torch.randn(14, 2, 8).bfloat16()), TypeError, "v is torch.bfloat16 but q is torch.float32"),
        (qkv(14, dtype=torch.complex64), TypeError, "q is torch.complex64"),
        (replaced(1, torch.empty(14, 2, 8, device="meta")), ValueError, "k is on meta but q is on cpu"),
        ([x.to("meta") for x in qkv(14)], ValueError, "shards are on cpu but q is on meta"),
        (replaced(1, [1.0]), TypeError, "k must be a tensor, not list"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(tensors, error, message):
    shards = megaring.to_device(one_rank(rank_multiple=8), "cpu")
    with pytest.raises(error, match=message):
        megaring.attention(*tensors, shards)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "fused"}, "fused: it needs a Hopper GPU, and q is on cpu"),
        ({"backend": "flash"}, "backend 'flash' is unknown; choose one of auto, fused, ring, reference"),
        ({"softmax_scale": float("nan")}, "softmax_scale is nan"),
        ({"softmax_scale": -1.0}, "softmax_scale is -1.0; it must be positive"),
    ],
)
def test_options_that_cannot_work_are_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        megaring.attention(*qkv(14), one_rank(), **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"causal": "no"}, "causal is 'no' (str); give True or False"),
        ({"deterministic": 1}, "deterministic is 1 (int)"),
        ({"softmax_scale": "1"}, "softmax_scale is '1' (str); give a number"),
        ({"softmax_scale": torch.ones(2)}, "(Tensor); give a number"),
    ],
)
def test_options_of_another_type_are_refused_by_name(options, message):
    with pytest.raises(TypeError, match=re.escape(message)):
        megaring.attention(*qkv(14), one_rank(), **options)


def test_sparse_tensors_are_refused_by_name():
    q, k, v = qkv(14)
    with pytest.raises(TypeError, match=r"q has layout torch\.sparse_coo"):
        megaring.attention(q.to_sparse(), k, v, one_rank())


def test_shards_are_checked():
    with pytest.raises(TypeError, match=r"shards must be a buddyring\.Shards"):
        megaring.attention(*qkv(14), [5, 9])
    with pytest.raises(ValueError, match=r"2 ranks, but torch\.distributed is not initialized"):
        megaring.attention(*qkv(14), Placement.from_groups([14], 2, [(0, 1)]).shards(0))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("group", [(1, 2), (0, 3)])
def test_misaligned_placements_are_refused(backend, group):
    shards = Placement.from_groups([14], 4, [group]).shards(1)
    with pytest.raises(ValueError, match="this placement is not aligned"):
        megaring.attention(*qkv(shards.rows), shards, backend=backend)


def refused_then_right(rank, world_size):
    """Refusals leave no message in flight: the right call after them still works."""
    placement = MIXED.placement()
    shards = placement.shards(rank)
    q, k, v = (place_rows(x, shards) for x in make_inputs(sum(MIXED.lengths), (4, 2), 8, torch.float64).tensors()[:3])
    messages = []
    alone = [dist.new_group([member]) for member in range(world_size)]
    for options in (
        {"shards": placement.shards((rank + 1) % 4)},
        {"shards": Placement.from_groups([len(q)], 2, [(rank % 2, 1)]).shards(rank % 2)},
        {"shards": shards, "group": alone[rank]},
        {"shards": shards, "group": alone[(rank + 1) % 4]},
        {"shards": shards, "q": q[:, :3]},
    ):
        arguments = {"q": q, "k": k, "v": v, **options}
        rows = max(1, len(arguments["shards"].tokens))
        arguments = {n: x.new_zeros(rows, *x.shape[1:]) if n in "qkv" else x for n, x in arguments.items()}
        with pytest.raises(ValueError) as caught:
            megaring.attention(**arguments)
        messages.append(str(caught.value))
    return messages, megaring.attention(q, k, v, shards)


def test_a_wrong_group_is_refused_before_any_communication(pool):
    results = pool.run(4, refused_then_right)
    inputs = make_inputs(sum(MIXED.lengths), (4, 2), 8, torch.float64)
    expected, _ = whole_attention(inputs.q, inputs.k, inputs.v, MIXED.lengths)
    for rank, (messages, _) in enumerate(results):
        assert f"those of rank {(rank + 1) % 4} of 4, but this process is rank {rank} of 4" in messages[0]
        assert "of 2, but this process" in messages[1]
        assert f"those of rank {rank} of 4, but this process is rank 0 of 1" in messages[2]
        assert "this process is not in the group" in messages[3]
        assert "3 query heads cannot share 2 KV heads" in messages[4]
    assert relative_error(gather_rows(MIXED, [out for _, out in results]), expected) < 1e-12


# Groups and waits


def in_a_subgroup(rank, world_size, inputs):
    """Two domains side by side, whose ranks are not the global ones."""
    domains = [dist.new_group([3, 1]), dist.new_group([0, 2])]
    domain = domains[0] if rank in (3, 1) else domains[1]
    case = CASES["2 ranks, mixed"]
    return run_case(dist.get_rank(domain), 2, case, inputs, {"backend": "ring", "group": domain})


def test_a_domain_may_be_any_group(pool):
    case = CASES["2 ranks, mixed"]
    inputs = make_inputs(sum(case.lengths), (4, 2), 8, torch.float64)
    results = pool.run(4, in_a_subgroup, inputs)
    expected, _ = whole_attention(inputs.q, inputs.k, inputs.v, case.lengths)
    for first, second in ((1, 3), (0, 2)):  # new_group sorts its ranks
        assert relative_error(gather_rows(case, [results[first][0], results[second][0]]), expected) < 1e-12


def peer_stays_away(rank, world_size):
    group = dist.new_group([0, 1], timeout=timedelta(seconds=1))
    shards = Case(2, (20,), ((0, 2),)).placement().shards(rank)
    message = None
    if rank == 0:
        with pytest.raises(RuntimeError) as caught:
            megaring.attention(*qkv(shards.rows), shards, group=group, backend="ring")
        message = str(caught.value)
    dist.barrier()
    return message


def test_a_peer_that_stays_away_is_an_error_within_the_group_s_timeout(pool):
    message, _ = pool.run(2, peer_stays_away, timeout=30)
    assert "exchange with rank 1 of the domain failed" in message and "timeout" in message


# What it says, and imports


def test_the_choice_is_logged_once(caplog):
    from megaring.attention import _say

    _say.cache_clear()
    shards = one_rank()
    with caplog.at_level(logging.INFO, logger="megaring"):
        for _ in range(3):
            megaring.attention(*qkv(14), shards)
    said = [record.message for record in caplog.records if "attention backend" in record.message]
    assert said == ["attention backend: ring (not fused: it needs a Hopper GPU, and q is on cpu)"]


def test_import_is_light_and_the_name_is_the_function_however_it_was_imported():
    program = (
        "import sys, megaring\n"
        "assert 'torch' not in sys.modules and 'numba' not in sys.modules\n"
        "import megaring.attention\n"
        "import torch\n"
        "from buddyring import Placement\n"
        "shards = Placement.from_groups([3], 1, [(0, 1)]).shards(0)\n"
        "x = torch.ones(3, 1, 8)\n"
        "assert torch.equal(megaring.attention(x, x, x, shards), x)\n"
        "from megaring.attention import attention\n"
        "from megaring import to_device\n"
        "assert torch.equal(attention(x, x, x, to_device(shards, 'cpu')), x)\n"
        "assert 'megatron' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
