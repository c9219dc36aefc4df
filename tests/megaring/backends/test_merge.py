"""Merging of partial softmax results: against one softmax, far from overflow, and with no keys at all."""

import pytest
import torch

from megaring.backends.merge import merge_into

INF = float("inf")


def partial(scores, values):
    """Output ``[n, 1, D]`` and LSE ``[n, 1]`` of scores ``[n, keys]`` over values ``[keys, D]``."""
    return (scores.softmax(-1) @ values)[:, None], scores.logsumexp(-1)[:, None]


@pytest.mark.parametrize("offset", [0.0, 90.0, -90.0, 5000.0, -5000.0])
def test_merged_blocks_are_one_softmax(offset):
    """exp(90) overflows in fp32; the blocks' scores differ by ``offset``."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(6, 10, generator=generator, dtype=torch.float64)
    scores[:, 4:] += offset
    values = torch.randn(10, 3, generator=generator, dtype=torch.float64)
    expected_out, expected_lse = partial(scores, values)
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 3e-6)):
        out, lse = (x.to(dtype) for x in partial(scores[:, :4], values[:4]))
        merge_into(out, lse, *(x.to(dtype) for x in partial(scores[:, 4:], values[4:])))
        assert torch.allclose(out.double(), expected_out, rtol=0, atol=tolerance)
        assert torch.allclose(lse.double(), expected_lse, rtol=tolerance, atol=tolerance)


def test_no_keys_is_neutral():
    out, lse = torch.randn(3, 2, 4), torch.randn(3, 2)
    nothing_out, nothing_lse = torch.zeros(3, 2, 4), torch.full((3, 2), -INF)
    left_out, left_lse = out.clone(), lse.clone()
    merge_into(left_out, left_lse, nothing_out, nothing_lse)
    assert torch.equal(left_out, out) and torch.equal(left_lse, lse)
    right_out, right_lse = nothing_out.clone(), nothing_lse.clone()
    merge_into(right_out, right_lse, out, lse)
    assert torch.equal(right_out, out) and torch.equal(right_lse, lse)
    merge_into(nothing_out, nothing_lse, torch.zeros(3, 2, 4), torch.full((3, 2), -INF))
    assert torch.equal(nothing_out, torch.zeros(3, 2, 4)) and nothing_lse.eq(-INF).all()


def test_a_half_precision_block_is_merged_in_fp32():
    out, lse = torch.zeros(1, 1, 1), torch.zeros(1, 1)
    merge_into(out, lse, torch.ones(1, 1, 1, dtype=torch.bfloat16), torch.zeros(1, 1))
    for _ in range(20):  # a sum in bf16 would stop moving at 2^-8 relative
        merge_into(out, lse, torch.ones(1, 1, 1, dtype=torch.bfloat16), torch.zeros(1, 1))
    assert out.dtype == torch.float32 and out.item() == pytest.approx(21 / 22, abs=1e-6)
    assert lse.item() == pytest.approx(torch.tensor(22.0).log().item(), abs=1e-6)
