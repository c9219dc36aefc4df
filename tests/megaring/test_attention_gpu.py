"""Attention on GPUs: the ring in one process and, over NCCL, on two; no host synchronisation once a plan exists."""

import pytest
import torch
from attention_cases import RESULTS, Case, gather_rows, make_inputs, oracle, place_rows, relative_error

import megaring

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
CASES = {
    1: Case(1, (1, 300, 129, 7), ((0, 1),) * 4, tile=128, rank_multiple=16),
    2: Case(2, (1000, 300, 77, 4, 513), ((0, 2), (0, 1), (1, 1), (0, 2), (0, 2)), tile=128, rank_multiple=16),
}

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")]


def needs_gpus(count):
    found = torch.cuda.device_count()
    if found < count:
        pytest.skip(f"needs {count} GPUs; torch sees {found}")


def on_gpu(rank, world_size, case, inputs, options):
    """One rank's results, the second of two runs, in which the host must not wait for the GPU."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    shards = case.placement().shards(rank)
    rows = [place_rows(x, shards).to(device) for x in inputs.tensors()]
    for synchronises in ("default", "error"):
        q, k, v, dout = (x.clone().requires_grad_(i < 3) for i, x in enumerate(rows))
        torch.cuda.set_sync_debug_mode(synchronises)
        out, lse = megaring.attention(q, k, v, shards, return_lse=True, **options)
        out.backward(dout)
        torch.cuda.set_sync_debug_mode("default")
    return [x.detach().cpu() for x in (out, lse, q.grad, k.grad, v.grad)]


@pytest.mark.parametrize("heads", [(8, 2), (8, 8), (5, 1)], ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("ranks", CASES)
def test_ring(pool, ranks, dtype, heads):
    needs_gpus(ranks)
    case = CASES[ranks]
    inputs = make_inputs(sum(case.lengths), heads, 128, dtype)
    expected = oracle(inputs, case.lengths)
    results = pool.run(ranks, on_gpu, case, inputs, {"backend": "ring"}, backend="nccl", timeout=120)
    for i, (name, right) in enumerate(zip(RESULTS, expected, strict=True)):
        value = gather_rows(case, [values[i] for values in results])
        assert relative_error(value, right) <= TOLERANCE[dtype], name
    for rank, values in enumerate(results):
        tokens = case.placement().shards(rank).num_tokens
        assert values[1][tokens:].eq(float("-inf")).all()
        assert not any(values[i][tokens:].any() for i in (0, 2, 3, 4))


def test_deterministic_runs_are_bit_equal(pool):
    needs_gpus(2)
    inputs = make_inputs(sum(CASES[2].lengths), (8, 2), 128, torch.bfloat16)
    options = {"backend": "ring", "deterministic": True}
    one, two = (pool.run(2, on_gpu, CASES[2], inputs, options, backend="nccl", timeout=120) for _ in range(2))
    for a, b in zip(one, two, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_reference_over_nccl(pool):
    needs_gpus(2)
    case = CASES[2]
    inputs = make_inputs(sum(case.lengths), (8, 2), 128, torch.float64)
    expected = oracle(inputs, case.lengths)
    results = pool.run(2, reference_on_gpu, case, inputs, backend="nccl", timeout=120)
    for i, right in enumerate(expected):
        assert relative_error(gather_rows(case, [values[i] for values in results]), right) <= 1e-12


def reference_on_gpu(rank, world_size, case, inputs):
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    shards = case.placement().shards(rank)
    rows = [place_rows(x, shards).to(device) for x in inputs.tensors()]
    q, k, v, dout = (x.requires_grad_(i < 3) for i, x in enumerate(rows))
    out, lse = megaring.attention(q, k, v, shards, backend="reference", return_lse=True)
    out.backward(dout)
    return [x.detach().cpu() for x in (out, lse, q.grad, k.grad, v.grad)]
