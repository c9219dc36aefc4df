"""``megaring.attention`` through the fused backend: numbers, strides, graphs and refusals on one GPU, then two GPUs."""

import shutil

import pytest
import torch
from attention_cases import Case, gather_rows, make_inputs, place_rows, relative_error, whole_attention
from torch.utils.checkpoint import checkpoint

import megaring
from buddyring import Placement
from megaring.backends import fused
from megaring.device_shards import to_device
from megaring.kernels.arena import PeerTimeout

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")]

LENGTHS = (1, 300, 129, 7, 513)
LIMITS = {torch.bfloat16: 4e-3, torch.float16: 6e-4}  # output and probabilities are rounded to the type once each
LSE_LIMIT = 2e-6


def shards(lengths=LENGTHS, rank_multiple=64):
    return Placement.from_groups(lengths, 1, [(0, 1)] * len(lengths), rank_multiple=rank_multiple).shards(0)


def packed(inputs, held):
    """q, k, v of a step on one rank, NaN in the rows of no sequence."""
    tokens = torch.tensor(held.tokens)
    rows = []
    for x in inputs.tensors()[:3]:
        whole = x.new_full((held.rows, *x.shape[1:]), float("nan"))
        whole[: len(tokens)] = x[tokens]
        rows.append(whole.cuda())
    return rows


def run(q, k, v, held, **options):
    with torch.no_grad():
        return megaring.attention(q, k, v, held, return_lse=True, **options)


def check(out, lse, inputs, held, limit, **options):
    tokens = held.num_tokens
    wide = [x.double() for x in inputs.tensors()[:3]]
    expected, expected_lse = whole_attention(*wide, held.placement.lengths, **options)
    order = torch.tensor(held.tokens)
    assert relative_error(out[:tokens].cpu(), expected[order]) <= limit
    assert relative_error(lse[:tokens].cpu(), expected_lse[order]) <= LSE_LIMIT
    assert not out[tokens:].any() and lse[tokens:].eq(float("-inf")).all()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("heads", [(8, 2), (4, 4), (5, 1), (12, 4)], ids=str)
def test_against_fp64_and_the_reference(heads, head_dim, dtype, causal):
    held = shards()
    inputs = make_inputs(sum(LENGTHS), heads, head_dim, dtype)
    q, k, v = packed(inputs, held)
    out, lse = run(q, k, v, held, backend="fused", causal=causal)
    assert (out.dtype, lse.dtype, out.shape) == (dtype, torch.float32, q.shape)
    check(out, lse, inputs, held, LIMITS[dtype], causal=causal)
    clean = [x.nan_to_num() for x in (q, k, v)]
    reference, reference_lse = run(*clean, held, backend="reference", causal=causal)
    tokens = held.num_tokens
    assert relative_error(out[:tokens], reference[:tokens]) <= LIMITS[dtype]
    assert relative_error(lse[:tokens], reference_lse[:tokens]) <= LSE_LIMIT


def test_auto_takes_it_unless_gradients_have_to_be_deterministic():
    held = shards()
    q, k, v = packed(make_inputs(sum(LENGTHS), (4, 2), 64, torch.bfloat16), held)
    q, k, v = (x.nan_to_num().requires_grad_() for x in (q, k, v))
    assert torch.equal(run(q, k, v, held)[0], run(q, k, v, held, backend="fused")[0])
    with pytest.raises(ValueError, match="its backward adds in no fixed order"):
        megaring.attention(q, k, v, held, backend="fused", deterministic=True)
    megaring.attention(q, k, v, held, deterministic=True).sum().backward()
    assert q.grad.isfinite().all()


def differentiated(inputs, held, **options):
    """dq, dk, dv of a step on one rank, and its output."""
    leaves = [x.requires_grad_() for x in packed(inputs, held)]
    gradient = leaves[0].new_full(leaves[0].shape, float("nan"))
    gradient[: held.num_tokens] = inputs.dout[torch.tensor(held.tokens)].to(gradient)
    out = megaring.attention(*leaves, held, backend="fused", **options)
    out.backward(gradient)
    return [leaf.grad for leaf in leaves], out


def check_gradients(found, inputs, held, limit, **options):
    wide = [x.double().requires_grad_() for x in inputs.tensors()[:3]]
    out, _ = whole_attention(*wide, held.placement.lengths, **options)
    wanted = torch.autograd.grad(out, wide, inputs.dout.double())
    order = torch.tensor(held.tokens)
    for ours, right in zip(found, wanted, strict=True):
        assert relative_error(ours[: held.num_tokens].cpu(), right[order]) <= limit
        assert not ours[held.num_tokens :].any(), "rows of no sequence take no gradient"


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("heads", [(8, 2), (4, 4), (5, 1), (12, 4)], ids=str)
def test_gradients_against_fp64(heads, head_dim, dtype, causal):
    held = shards()
    inputs = make_inputs(sum(LENGTHS), heads, head_dim, dtype)
    found, _ = differentiated(inputs, held, causal=causal)
    check_gradients(found, inputs, held, 1.5 * LIMITS[dtype], causal=causal)


def test_tasks_of_fewer_heads_are_chosen_where_tasks_are_few_and_give_the_same():
    held = shards((3000,), rank_multiple=1)
    site = fused.site(to_device(held, "cuda"), (8, 1, 128), gradients=True)
    assert site.heads_per_task == 1 and site.gradients.plan.sum_all
    inputs = make_inputs(3000, (8, 1), 128, torch.bfloat16)
    found, _ = differentiated(inputs, held)
    check_gradients(found, inputs, held, 6e-3)


def test_two_steps_in_one_graph_and_recompute():
    held, other = shards(), shards((500, 450), rank_multiple=64)
    inputs = make_inputs(sum(LENGTHS), (4, 2), 64, torch.bfloat16)
    x = packed(inputs, held)[0].nan_to_num()

    def layers(x, recompute):
        k, v = x[:, ::2].contiguous(), x[:, 1::2].contiguous()
        for step in (held, other, held):
            call = lambda q, step=step: megaring.attention(q, k, v, step, backend="fused")  # noqa: E731
            x = checkpoint(call, x, use_reentrant=False) if recompute else call(x)
        return x

    assert other.rows == held.rows
    found = []
    for recompute in (False, True):
        leaf = x.clone().requires_grad_()
        layers(leaf, recompute).sum().backward()
        found.append(leaf.grad)
    assert found[0].isfinite().all() and found[0].any()
    assert relative_error(found[1], found[0].double()) <= 1e-4, "only the order of fp32 additions may differ"


def test_a_graph_replays_forward_and_backward():
    held = shards()
    inputs = make_inputs(sum(LENGTHS), (4, 2), 128, torch.bfloat16)
    leaves = [x.nan_to_num().requires_grad_() for x in packed(inputs, held)]
    gradient = torch.randn_like(leaves[0])
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        eager = torch.autograd.grad(megaring.attention(*leaves, held, backend="fused"), leaves, gradient)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = torch.autograd.grad(megaring.attention(*leaves, held, backend="fused"), leaves, gradient)
    for _ in range(3):
        for x in captured:
            x.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        for ours, right in zip(captured, eager, strict=True):
            assert relative_error(ours, right.double()) <= 1e-4


@pytest.mark.parametrize("kind", ["sliced", "heads first", "odd start", "tokens only"])
def test_strided_inputs_and_tensors_without_dummy_rows(kind):
    held = shards()
    inputs = make_inputs(sum(LENGTHS), (8, 2), 64, torch.bfloat16)
    q, k, v = packed(inputs, held)
    if kind == "sliced":
        q, k, v = torch.cat([q, k, v], dim=1).split([8, 2, 2], dim=1)
    elif kind == "heads first":
        q, k, v = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v))
    elif kind == "odd start":
        moved = []
        for x in (q, k, v):
            store = torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)
            store[1:] = x.flatten()
            moved.append(store[1:].view(x.shape))
        q, k, v = moved
    else:
        q, k, v = (x[: held.num_tokens] for x in (q, k, v))
    out, lse = run(q, k, v, held, backend="fused")
    assert out.is_contiguous()
    check(out, lse, inputs, held, LIMITS[torch.bfloat16])


def test_a_scale_of_its_own_and_a_step_without_sequences():
    held = shards()
    inputs = make_inputs(sum(LENGTHS), (4, 2), 64, torch.float16)
    out, lse = run(*packed(inputs, held), held, backend="fused", softmax_scale=0.31)
    check(out, lse, inputs, held, LIMITS[torch.float16], scale=0.31)
    empty = Placement.from_groups([], 1, [], rank_multiple=8).shards(0)
    x = torch.full((8, 2, 64), float("nan"), device="cuda", dtype=torch.bfloat16)
    out, lse = run(x, x, x, empty, backend="fused")
    assert not out.any() and lse.eq(float("-inf")).all()


def test_a_cuda_graph_replays_a_placement_with_new_values():
    held = megaring.to_device(shards(), "cuda")
    stream = torch.cuda.Stream()
    static = [torch.empty(held.shards.rows, heads, 128, dtype=torch.bfloat16, device="cuda") for heads in (8, 2, 2)]
    for x in static:
        x.fill_(1.0)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run(*static, held, backend="fused")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        out, lse = run(*static, held, backend="fused")
    for seed in range(5):
        inputs = make_inputs(sum(LENGTHS), (8, 2), 128, torch.bfloat16, seed)
        for target, value in zip(static, packed(inputs, held.shards), strict=True):
            target.copy_(value)
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        check(out, lse, inputs, held.shards, LIMITS[torch.bfloat16])
        first = out.clone()
        graph.replay()
        assert torch.equal(first, out) and torch.equal(first, run(*static, held, backend="fused")[0])


def test_a_capture_before_any_call_says_what_to_do():
    held = megaring.to_device(shards((77, 5)), "cuda")
    x = torch.zeros(held.shards.rows, 2, 64, dtype=torch.bfloat16, device="cuda")
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with pytest.raises(ValueError, match="make the same call once before the capture"):  # noqa: SIM117
        with torch.cuda.graph(graph, stream=stream):
            run(x, x, x, held, backend="fused")


@pytest.mark.skipif(shutil.which("cc") is None and shutil.which("gcc") is None, reason="torch.compile needs a compiler")
def test_a_compiled_layer_calls_the_operator():
    held = megaring.to_device(shards(), "cuda")
    inputs = make_inputs(sum(LENGTHS), (8, 2), 128, torch.bfloat16)
    q, k, v = (x.nan_to_num() for x in packed(inputs, held.shards))
    site = fused.site(held, (4, 2, 128))

    def layer(q, k, v):
        return torch.ops.megaring.forward(q * 1.0, k, v, site.number, 128**-0.5)[0] * 2.0

    with torch.no_grad():
        compiled = torch.compile(layer, fullgraph=True)(q, k, v)
        eager = layer(q, k, v)
    assert torch.equal(compiled, eager)
    assert torch.equal(eager, run(q, k, v, held, backend="fused")[0] * 2.0)


# Two processes, one GPU each

TWO = torch.cuda.device_count() >= 2
two_gpus = pytest.mark.skipif(not TWO, reason=f"needs 2 GPUs; torch sees {torch.cuda.device_count()}")
SPLIT = Case(2, (1000, 300, 77, 4, 513), ((0, 2), (0, 1), (1, 1), (0, 2), (0, 2)), tile=128, rank_multiple=16)
LARGER = Case(2, (9000, 20000, 77), ((0, 2), (0, 2), (1, 1)), tile=128, rank_multiple=16)
EMPTY = Case(2, (300,), ((0, 1),), tile=128)


def on_two(rank, world_size, cases, heads, head_dim, dtype, replays):
    """Per case the outputs of this rank's second call; with ``replays``, then of as many replays of a graph."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    stream, results = torch.cuda.Stream(), []
    with torch.cuda.stream(stream):
        for case in cases:
            held = megaring.to_device(case.placement().shards(rank), device)
            inputs = make_inputs(sum(case.lengths), heads, head_dim, dtype)
            q, k, v = (place_rows(x, held.shards).to(device) for x in inputs.tensors()[:3])
            first = run(q, k, v, held, backend="fused")
            second = run(q, k, v, held, backend="fused")
            assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
            results.append([x.cpu() for x in second])
    torch.cuda.synchronize()
    if replays:
        graph = torch.cuda.CUDAGraph()
        # Other threads (NCCL's watchdog) may call CUDA meanwhile.
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            out, lse = run(q, k, v, held, backend="fused")
        for _ in range(replays):
            out.fill_(float("nan"))
            graph.replay()
            torch.cuda.synchronize()
            fused.check()
            assert torch.equal(out, second[0]) and torch.equal(lse, second[1])
    return results


@two_gpus
@pytest.mark.parametrize(
    ("heads", "head_dim", "dtype"),
    [((8, 2), 128, torch.bfloat16), ((5, 1), 64, torch.float16), ((16, 16), 128, torch.float16)],
    ids=str,
)
def test_split_sequences_on_two_gpus(pool, heads, head_dim, dtype):
    cases = [SPLIT, EMPTY, LARGER, SPLIT]  # the third one needs a larger arena
    results = pool.run(2, on_two, cases, heads, head_dim, dtype, 4, backend="nccl", timeout=180)
    for i, case in enumerate(cases):
        inputs = make_inputs(sum(case.lengths), heads, head_dim, dtype)
        out, lse = (gather_rows(case, [values[i][part] for values in results]) for part in range(2))
        if case is LARGER:
            assert out.isfinite().all() and lse.isfinite().all()
            continue
        expected, expected_lse = whole_attention(*(x.double() for x in inputs.tensors()[:3]), case.lengths)
        assert relative_error(out, expected) <= LIMITS[dtype]
        assert relative_error(lse, expected_lse) <= LSE_LIMIT


def stays_away(rank, world_size):
    """Rank 1 makes no second call; then both go on with a new arena."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    group = torch.distributed.group.WORLD
    fused.configure(timeout_s=1.0)
    held = megaring.to_device(SPLIT.placement().shards(rank), device)
    q, k, v = (torch.randn(held.shards.rows, heads, 64, device=device).bfloat16() for heads in (4, 2, 2))
    good = run(q, k, v, held, backend="fused")[0]
    torch.cuda.synchronize()
    torch.distributed.barrier()
    message, poisoned = "", True
    if rank == 0:
        poisoned = bool(run(q, k, v, held, backend="fused")[0].isnan().all())
        with pytest.raises(PeerTimeout) as caught:
            fused.check()
        message = str(caught.value)
    torch.distributed.barrier()
    fused.rebuild(group, device)
    again = run(q, k, v, held, backend="fused")[0]
    torch.cuda.synchronize()
    fused.check()
    fused.configure()
    return message, poisoned, bool(torch.equal(again, good))


@two_gpus
def test_a_peer_that_stays_away_is_an_error_and_the_arena_can_be_rebuilt(pool):
    results = pool.run(2, stays_away, backend="nccl", timeout=120)
    assert "rank 0 waited for a tile from rank 1" in results[0][0] and "fused.rebuild" in results[0][0]
    assert [result[1:] for result in results] == [(True, True)] * 2


def plans_otherwise(rank, world_size):
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    fused.configure(timeout_s=1.0)
    lengths = (512, 1024) if rank == 0 else (1024, 512)
    held = megaring.to_device(Case(2, lengths, ((0, 2), (0, 2)), tile=128).placement().shards(rank), device)
    q, k, v = (torch.randn(held.shards.rows, heads, 64, device=device).bfloat16() for heads in (4, 2, 2))
    run(q, k, v, held, backend="fused")
    torch.cuda.synchronize()
    with pytest.raises(PeerTimeout) as caught:
        fused.check()
    fused.configure()
    return str(caught.value)


@two_gpus
def test_ranks_that_plan_different_steps_are_stopped(pool):
    messages = pool.run(2, plans_otherwise, backend="nccl", timeout=120)
    assert any("a tile of the same placement" in message for message in messages), messages
