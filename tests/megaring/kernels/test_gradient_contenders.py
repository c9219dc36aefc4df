"""What the backward is raced against, on CPUs, with stand-ins for kernels and clocks."""

import math

import pytest
import torch
from torch.nn.attention import SDPBackend

from buddyring.placement import Placement
from megaring.kernels.checks import calls, gradient_calls, gradient_contenders, race, timing
from megaring.kernels.checks.contenders import forward_flops, random_tensors
from megaring.kernels.checks.gradient_contenders import (
    backward_flops,
    fused_backward,
    library_backward,
    random_gradient,
)
from megaring.kernels.checks.race import Contender


def by_autograd(tensors, gradient, lengths):
    """dQ, dK and dV of packed sequences, in fp64, dK and dV of each query head by itself."""
    copies = [x.double().repeat_interleave(32 // x.shape[1], 1).requires_grad_() for x in tensors]
    outs = []
    for q, k, v in zip(*(x.split(lengths) for x in copies), strict=True):
        scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[2] ** -0.5
        scores = scores.masked_fill(torch.ones(scores.shape[1:], dtype=torch.bool).triu(1), -math.inf)
        outs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v))
    return torch.autograd.grad(torch.cat(outs), copies, gradient.double())


@pytest.mark.parametrize(("backend", "gqa"), [(SDPBackend.MATH, True), (SDPBackend.MATH, False)])
@pytest.mark.parametrize("lengths", [(40,), (16, 16)])
def test_a_library_differentiates_the_sequences_as_a_batch(monkeypatch, backend, gqa, lengths):
    tensors, gradient = random_tensors(sum(lengths), "cpu"), random_gradient(sum(lengths), "cpu")
    right = by_autograd(tensors, gradient, lengths)
    real = gradient_contenders.scaled_dot_product_attention

    def attend(*args, enable_gqa, **options):
        if enable_gqa and not gqa:
            raise RuntimeError("no GQA here")
        return real(*args, enable_gqa=enable_gqa, **options)

    monkeypatch.setattr(gradient_contenders, "scaled_dot_product_attention", attend)
    made = library_backward("math", backend, lengths, tensors, gradient)
    assert made.flops == backward_flops(lengths) == 2.5 * forward_flops(lengths)
    for _ in range(2):  # the graph is kept
        for i, (found, wanted) in enumerate(zip(made.run(), right, strict=True)):
            if i and gqa:
                wanted = wanted.unflatten(1, (8, 4)).sum(dim=2)
            packed = found.transpose(1, 2).reshape(wanted.shape).double()
            assert float((packed - wanted).norm() / wanted.norm()) < 1e-2


def test_a_library_that_cannot_run_is_named(monkeypatch, capsys):
    def refuse(*args, **options):
        raise RuntimeError("no kernel\nmore")

    monkeypatch.setattr(gradient_contenders, "scaled_dot_product_attention", refuse)
    monkeypatch.setattr(gradient_contenders.flash3, "refusal", lambda *args: "not here")
    assert gradient_contenders.backward_libraries((8,), random_tensors(8, "cpu"), random_gradient(8, "cpu")) == []
    assert capsys.readouterr().out.splitlines() == ["cudnn does not run: no kernel", "fa2 does not run: no kernel"]


@pytest.fixture
def launches(monkeypatch):
    """What the backward's launches got: (query heads per task, whether all is summed, other options)."""
    made, real = [], torch.zeros

    def launch(domain, calls, *, softmax_scale, heads_per_task, **options):
        made.append((heads_per_task, calls[0].plan.plan.sum_all, len(calls), options))

    monkeypatch.setattr(torch, "zeros", lambda *args, pin_memory=False, **options: real(*args, **options))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(calls, "megaring_forward", lambda *args, **options: None)
    monkeypatch.setattr(gradient_calls, "megaring_backward", launch)
    monkeypatch.setattr(gradient_contenders, "multiprocessors", lambda device: 132)
    return made


def test_ours_takes_the_tasks_that_attention_would_or_those_asked_for(launches):
    tensors, gradient = random_tensors(300, "cpu"), random_gradient(300, "cpu")
    one, two = (Placement.from_groups([300], n, [(0, n)]) for n in (1, 2))
    for placement, options in (
        (one, {}),
        (one, {"heads_per_task": 4}),
        (two, {"heads_per_task": 2, "reserved_sms": 4}),
    ):
        made = fused_backward("ours", placement, tensors, gradient, None, **options)
        made.run()
        assert made.flops == backward_flops([300])
    fixed = {"timeout_s": 5.0, "folder": None}
    assert launches == [
        (1, True, 1, fixed),  # one short sequence: tasks of one head, so that there are enough
        (4, False, 1, fixed),
        (2, True, 2, {**fixed, "reserved_sms": 4}),
    ]


def test_the_stage_tells_shapes_clocks_and_host_times(monkeypatch, capsys):
    made = []

    def entrants(lengths, folder, variants):
        made.append((lengths, [name for name, _ in variants]))
        return [Contender("fused", lambda: 2.0, 4e9), Contender("cudnn", lambda: 3.0, 4e9)]

    monkeypatch.setattr(timing, "backward_contenders", entrants)
    monkeypatch.setattr(timing, "random_tensors", lambda tokens: None)
    monkeypatch.setattr(timing, "random_gradient", lambda tokens: None)
    monkeypatch.setattr(timing, "fused_backward", lambda *args: Contender("fused", lambda: None, 1.0))
    monkeypatch.setattr(timing, "through_autograd", lambda *args: lambda: None)
    monkeypatch.setattr(race, "_timed", lambda contender, calls, ranks: contender.run())
    monkeypatch.setattr(race, "gpu_state", lambda device: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    rows = list(timing.time_backward(None, rounds=2))
    assert [lengths for lengths, _ in made] == list(timing.SHAPES.values())
    assert made[0][1] == ["1 per task", "2 per task", "4 per task"]
    assert [row["contender"] for row in rows if "contender" in row] == ["fused", "cudnn"] * 4
    assert rows[0]["speed"] == pytest.approx(1.5) and rows[0]["tflops"] == pytest.approx(2.0)
    assert rows[-1]["shape"] == "host" and 0 <= rows[-1]["host_us"] < 1e3 and "autograd_us" in rows[-1]
    shown = capsys.readouterr().out
    assert "1 x 8192   TFLOP/s (x cuDNN): fused 2 (1.500x), cudnn 1 (1.000x); 2 rounds, clocks unknown" in shown
    assert "us (host), " in shown and "us (autograd)" in shown
