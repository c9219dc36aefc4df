"""Both backends against whole-sequence attention in fp64: output, LSE, dQ, dK and dV of every rank."""

import pytest
import torch
from attention_cases import CASES, RESULTS, Case, gather_rows, make_inputs, oracle, place_rows, relative_error, run_case

BACKENDS = ("ring", "reference")
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}


def check(pool, case, heads, dtype, head_dim=8, tolerance=None, **options):
    """Run a case and compare every rank's rows with the oracle's; dummy rows are exact."""
    inputs = make_inputs(sum(case.lengths), heads, head_dim, dtype)
    math_options = {name: options[name] for name in ("causal", "softmax_scale") if name in options}
    expected = oracle(inputs, case.lengths, **math_options)
    results = pool.run(case.ranks, run_case, case, inputs, options)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for rank, values in enumerate(results):
        shards = case.placement().shards(rank)
        for name, value, whole in zip(RESULTS, values, expected, strict=True):
            assert value.dtype == (wide if name == "lse" else dtype)
            assert value.shape == (shards.rows, *whole.shape[1:])
            right = place_rows(whole, shards)[: shards.num_tokens]
            error = relative_error(value[: shards.num_tokens], right)
            assert error <= (tolerance or TOLERANCE[dtype]), f"{name} on rank {rank}: {error:.2e}"
            dummies = value[shards.num_tokens :]
            assert torch.equal(dummies, torch.full_like(dummies, float("-inf") if name == "lse" else 0.0))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_placements(pool, backend, name, dtype):
    check(pool, CASES[name], (4, 2), dtype, backend=backend)


@pytest.mark.parametrize("heads", [(8, 8), (8, 4), (6, 2), (5, 1), (16, 1), (1, 1)], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_head_ratios(pool, backend, heads):
    check(pool, CASES["4 ranks, mixed"], heads, torch.float64, backend=backend)


@pytest.mark.parametrize("head_dim", [1, 3, 32, 130])
@pytest.mark.parametrize("backend", BACKENDS)
def test_head_dimensions(pool, backend, head_dim):
    check(pool, CASES["2 ranks, mixed"], (4, 2), torch.float64, head_dim, backend=backend)


@pytest.mark.parametrize("name", ["1 rank", "4 ranks, mixed", "8 ranks, mixed"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_without_causality(pool, backend, name):
    check(pool, CASES[name], (4, 2), torch.float64, backend=backend, causal=False)


@pytest.mark.parametrize("scale", [0.7, 1e-3, 40.0])
@pytest.mark.parametrize("backend", BACKENDS)
def test_scales(pool, backend, scale):
    """40 makes scores of several hundred, whose exponentials overflow without a shift."""
    check(pool, CASES["4 ranks, mixed"], (4, 2), torch.float64, backend=backend, softmax_scale=scale, tolerance=1e-11)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("size", [2, 4, 8])
def test_shortest_sequences_of_a_group(pool, backend, size):
    lengths = (2 * size, 2 * size + 1, 2 * size)
    case = Case(size, lengths, ((0, size),) * 3, tile=128)
    check(pool, case, (4, 2), torch.float64, backend=backend)


def test_tiles_of_128(pool):
    """More than one tile per chunk, and a last tile that is cut."""
    case = Case(4, (1500, 700), ((0, 4), (2, 2)), tile=128)
    check(pool, case, (2, 1), torch.float64, 16, backend="ring")


def test_bf16_error_on_eight_ranks_is_that_of_one_flash_kernel(pool):
    case = Case(8, (2048,), ((0, 8),), tile=16)
    inputs = make_inputs(2048, (4, 2), 64, torch.bfloat16)
    expected = oracle(inputs, case.lengths)
    results = pool.run(8, run_case, case, inputs, {"backend": "ring"})
    ours = [gather_rows(case, [values[i] for values in results]) for i in range(5)]
    q, k, v, dout = (x.transpose(0, 1)[None] for x in inputs.tensors())
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)
    grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(dout, q, k, v, out, lse, 0.0, True)
    single = [x[0].transpose(0, 1) for x in (out, lse, *grads)]
    for name, value, one, right in zip(RESULTS, ours, single, expected, strict=True):
        assert relative_error(value, right) <= 1.2 * relative_error(one, right), name
