"""Local kernels against dense attention of each segment in fp64, and their backward as a share of a larger softmax."""

import importlib

import numpy as np
import pytest
import torch

from megaring.backends.local import FAMILIES, choose_kernel, plain
from megaring.backends.local.segments import Segments

TOLERANCE = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}
LENGTHS = {
    "causal": ((5, 5, 1, 70, 33, 33, 2), (5, 5, 1, 70, 33, 33, 2)),
    "unequal": ((3, 3, 1, 65, 7), (9, 9, 40, 2, 1)),
}


def kernel_on(family, device, dtype, head_dim):
    kernel = importlib.import_module(f"megaring.backends.local.{family}")
    reason = kernel.refusal(device, dtype, head_dim)
    if reason is not None:
        pytest.skip(f"{kernel.NAME} cannot run on {device} with {dtype}: {reason}")
    return kernel


def dense(q, k, v, lengths, causal, scale):
    outs, lses = [], []
    for qs, ks, vs in zip(q.split(lengths[0]), k.split(lengths[1]), v.split(lengths[1]), strict=True):
        repeat = q.shape[1] // k.shape[1]
        scores = torch.einsum("qhd,khd->hqk", qs, ks.repeat_interleave(repeat, 1)) * scale
        if causal:
            scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf"))
        outs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), vs.repeat_interleave(repeat, 1)))
        lses.append(scores.logsumexp(-1).t())
    return torch.cat(outs), torch.cat(lses)


def tensors(lengths, heads, head_dim, dtype, device):
    generator = torch.Generator().manual_seed(1)
    shapes = [(sum(lengths[i]), count, head_dim) for i, count in ((0, heads[0]), (1, heads[1]), (1, heads[1]))]
    shapes.append(shapes[0])
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).to(device) for s in shapes]


def close(value, expected, tolerance):
    error = (value.double() - expected.double()).abs().max() / expected.double().abs().max().clamp(min=1e-3)
    assert error <= tolerance, f"{error:.2e}"


def check_kernel(family, device, dtype, kind, heads=(4, 2), head_dim=16):
    device = torch.device(device)
    kernel = kernel_on(family, device, dtype, head_dim)
    lengths, causal, scale = LENGTHS[kind], kind == "causal", 0.3
    segments = Segments.build(*(np.array(x) for x in lengths), device)
    q, k, v, dout = tensors(lengths, heads, head_dim, dtype, device)
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    expected_out, expected_lse = dense(*exact, lengths, causal, scale)
    expected_grads = torch.autograd.grad(expected_out, exact, dout.double())
    out, lse = kernel.forward(q, k, v, segments, causal, scale)
    assert out.shape == q.shape and lse.shape == q.shape[:2]
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    close(out, expected_out, TOLERANCE[dtype])
    close(lse, expected_lse, 1e-3 if dtype in (torch.bfloat16, torch.float16) else TOLERANCE[dtype])
    final = (out.to(dtype), lse.contiguous())
    for deterministic in (False, True):
        grads = kernel.backward(dout, q, k, v, *final, segments, causal, scale, deterministic)
        for x, grad, expected in zip((q, k, v), grads, expected_grads, strict=True):
            assert grad.shape == x.shape
            close(grad, expected, 4 * TOLERANCE[dtype])


@pytest.mark.parametrize("kind", LENGTHS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("family", ["torch_flash_cpu", "plain"])
def test_on_cpu(family, dtype, kind):
    check_kernel(family, "cpu", dtype, kind)


@pytest.mark.parametrize("heads", [(3, 3), (6, 2), (5, 1)], ids=str)
@pytest.mark.parametrize("family", ["torch_flash_cpu", "plain"])
def test_head_ratios_on_cpu(family, heads):
    check_kernel(family, "cpu", torch.float64, "unequal", heads, head_dim=5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")
@pytest.mark.parametrize("heads", [(8, 8), (8, 2), (5, 1)], ids=str)
@pytest.mark.parametrize("kind", LENGTHS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "torch_flash_cpu"])
def test_on_gpu(family, dtype, kind, heads):
    check_kernel(family, "cuda", dtype, kind, heads, head_dim=128)


def test_plain_is_the_same_in_pieces(monkeypatch):
    """Long segments are cut along their queries."""
    monkeypatch.setattr(plain, "SCORES", 300)
    check_kernel("plain", "cpu", torch.float64, "causal")
    check_kernel("plain", "cpu", torch.float64, "unequal")


@pytest.mark.parametrize("family", ["torch_flash_cpu", "plain"])
def test_backward_shares_of_two_blocks_of_keys_add_up(family):
    """With output and LSE over all keys, each block of keys gives its part of dQ, and its own dK and dV."""
    kernel = kernel_on(family, torch.device("cpu"), torch.float64, 8)
    q, k, v, dout = tensors(((6, 3), (10, 7)), (4, 2), 8, torch.float64, "cpu")
    exact = [x.clone().requires_grad_() for x in (q, k, v)]
    out, lse = dense(*exact, ((6, 3), (10, 7)), False, 0.3)
    expected = torch.autograd.grad(out, exact, dout)
    first = torch.tensor([*range(4), *range(10, 12)])  # 4 keys of the first segment, 2 of the second
    second = torch.tensor([*range(4, 10), *range(12, 17)])
    total = torch.zeros_like(q)
    for rows, lengths in ((first, (4, 2)), (second, (6, 5))):
        segments = Segments.build(np.array([6, 3]), np.array(lengths), torch.device("cpu"))
        dq, dk, dv = kernel.backward(dout, q, k[rows], v[rows], out.detach(), lse.detach(), segments, False, 0.3, False)
        total += dq
        close(dk, expected[1][rows], 1e-13)
        close(dv, expected[2][rows], 1e-13)
    close(total, expected[0], 1e-13)


def test_the_choice_on_a_cpu():
    for dtype in TOLERANCE:
        assert choose_kernel(torch.device("cpu"), dtype, 64).NAME == "torch's flash attention for CPUs"


def test_gpu_families_say_why_they_cannot_run_on_a_cpu():
    for family in ("flash3", "flash2", "torch_flash"):
        kernel = importlib.import_module(f"megaring.backends.local.{family}")
        assert kernel.refusal(torch.device("cpu"), torch.bfloat16, 128) == "it needs a GPU"


def test_empty_segments_are_refused():
    with pytest.raises(ValueError, match="a segment without queries or keys"):
        Segments.build(np.array([3, 0]), np.array([3, 1]), torch.device("cpu"))
