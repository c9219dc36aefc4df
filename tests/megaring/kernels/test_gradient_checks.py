"""What the self-checks of gradients compute and judge, with gradients of whole sequences in the kernel's place."""

import math

import pytest
import torch

from buddyring.placement import Placement
from megaring.kernels.checks import backward, calls, gradient_bank, gradient_calls, gradient_mixes
from megaring.kernels.checks.bank import Kind, query_numbers
from megaring.kernels.checks.forward import Case
from megaring.kernels.checks.gradient_bank import (
    GradientBank,
    gradient_errors,
    gradient_inputs,
    gradient_squares,
    gradients_fp64,
)
from megaring.kernels.checks.gradient_mixes import GradientMix, gradient_mix, gradient_outcome, run_gradient_mix
from megaring.kernels.checks.mixes import LENGTHS, MIXES

KIND = Kind(head_dim=8, dtype=torch.float16)
MIXED = [
    GradientMix(Case((130, 300, 1), 1, ((0, 1),) * 3, 4, 2, head_dim=8, dtype=torch.float16), 1),
    GradientMix(Case((600, 5, 140), 4, ((0, 4), (1, 1), (2, 2)), 6, 3, 8, torch.float16, True, True, 8), 2),
    GradientMix(Case((300, 64), 2, ((0, 2), (0, 1)), 8, 1, 8, torch.float16, causal=False), 4),
]


def by_autograd(q, k, v, gradient, causal):
    """dQ, dK and dV in fp64, by torch's own differentiation of attention written out."""
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    ratio = q.shape[1] // k.shape[1]
    keys, values = (x.repeat_interleave(ratio, 1) for x in leaves[1:])
    scores = torch.einsum("qhd,khd->hqk", leaves[0], keys) * q.shape[2] ** -0.5
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[1:], dtype=torch.bool).triu(1), -math.inf)
    out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
    return torch.autograd.grad(out, leaves, gradient.double())


@pytest.fixture
def kernel(monkeypatch):
    """Differentiates whole sequences where the kernel would its tiles; ``kernel.spoil`` may change every result."""

    class Kernel:
        spoil = staticmethod(lambda calls: None)
        launches = 0

        def __call__(self, domain, made, *, softmax_scale, heads_per_task, **options):
            self.launches += 1
            if len(made) < self.placement.ranks:
                return self.spoil(made)
            assert softmax_scale == made[0].forward.q.shape[2] ** -0.5
            for call in made:
                gradients = (call.dq, call.dk, call.dv)
                assert all(gradient.isnan().all() for gradient in gradients), "they are poisoned before every call"
                ratio = call.dq.shape[1] // call.dk.shape[1]
                assert call.plan.plan.sum_all == ((heads_per_task or ratio) < ratio)
            for start, length in zip(self.starts, self.placement.lengths, strict=True):
                whole = [
                    self.gathered(made, pick)[start : start + length]
                    for pick in (
                        lambda call: call.forward.q,
                        lambda call: call.forward.k,
                        lambda call: call.forward.v,
                        lambda call: call.output_gradient,
                    )
                ]
                self.scattered(made, start, length, by_autograd(*whole, made[0].forward.plan.plan.causal))
            for call, tokens in zip(made, self.tokens, strict=True):
                for gradient in (call.dq, call.dk, call.dv):
                    gradient[len(tokens) :] = 0
            self.spoil(made)

        def place(self, placement):
            self.placement = placement
            self.starts = [sum(placement.lengths[:i]) for i in range(len(placement.lengths))]
            self.tokens = [torch.from_numpy(placement.shards(r).tokens.copy()) for r in range(placement.ranks)]

        def gathered(self, made, pick):
            whole = pick(made[0]).new_empty((sum(self.placement.lengths), *pick(made[0]).shape[1:]))
            for call, tokens in zip(made, self.tokens, strict=True):
                whole[tokens] = pick(call)[: len(tokens)]
            return whole

        def scattered(self, made, start, length, gradients):
            for call, tokens in zip(made, self.tokens, strict=True):
                rows = ((tokens >= start) & (tokens < start + length)).nonzero().flatten()
                for target, gradient in zip((call.dq, call.dk, call.dv), gradients, strict=True):
                    target[rows] = gradient[tokens[rows] - start].to(target.dtype)

    real, from_groups, made = torch.zeros, Placement.from_groups, Kernel()

    def placed(*args, **options):
        placement = from_groups(*args, **options)
        made.place(placement)
        return placement

    monkeypatch.setattr(torch, "zeros", lambda *args, pin_memory=False, **options: real(*args, **options))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(Placement, "from_groups", placed)
    monkeypatch.setattr(calls, "megaring_forward", lambda *args, **options: None)
    monkeypatch.setattr(gradient_calls, "megaring_backward", made)
    return made


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("score_bytes", [1, 3000, 1 << 20])
def test_fp64_in_blocks_of_rows(causal, score_bytes):
    q, k, v, gradient = (torch.randn(77, heads, 16).bfloat16() for heads in (6, 2, 2, 6))
    dq, dk, dv = gradients_fp64(q, k, v, gradient, causal=causal, score_bytes=score_bytes)
    found = (dq, *(x.unflatten(1, (2, 3)).sum(2) for x in (dk, dv)))
    for ours, right in zip(found, by_autograd(q, k, v, gradient, causal), strict=True):
        assert torch.allclose(ours, right, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(("query_heads", "kv_heads"), [(1, 1), (16, 1), (8, 8), (12, 4), (15, 3)])
def test_a_case_s_heads_are_those_of_the_bank(monkeypatch, query_heads, kv_heads):
    monkeypatch.setattr(gradient_bank, "COMPARED_BYTES", 8 * 8 * 50)  # a head at a time
    entry = GradientBank("cpu").entry(50, KIND)
    (q, k, v), gradient = gradient_inputs([entry], query_heads, kv_heads)
    assert (q.shape, k.shape, gradient.shape) == ((50, query_heads, 8), (50, kv_heads, 8), q.shape)
    right = by_autograd(q, k, v, gradient, True)
    rows = torch.randperm(50)
    noise = [torch.randn_like(each) for each in right]
    off = [each + 0.01 * more for each, more in zip(right, noise, strict=True)]
    sums = sum(gradient_squares(entry, [each[part] for each in off], part) for part in (rows[:13], rows[13:]))
    errors, library = gradient_errors(sums, (query_heads, kv_heads, kv_heads), 8)
    for error, theirs, more, each in zip(errors, library, noise, right, strict=True):
        assert error == pytest.approx(float(0.01 * more.norm() / each.norm()), rel=1e-6)
        rounded = gradient_calls.gradient_error(each.half(), each)
        assert 0.5 * rounded < theirs < 6 * rounded  # on the same heads
    assert len(set(query_numbers(query_heads, kv_heads))) == min(query_heads // kv_heads, 3) * min(kv_heads, 3)


def test_the_bank_gives_the_same_values_again_and_names_the_library(monkeypatch):
    bank = GradientBank("cpu")
    entry = bank.entry(200, KIND)
    assert bank.entry(200, KIND) is entry and entry.library == "FlashAttention-2"
    for made, wanted in zip(entry.made, entry.wanted, strict=True):
        assert made.dtype == torch.float16 and gradient_calls.gradient_error(made, wanted) < 1e-3
    monkeypatch.setattr(gradient_bank, "CUDNN_FROM", 100)  # which CPUs do not have
    assert GradientBank("cpu").entry(200, KIND).library == "FlashAttention-2"
    assert bank.libraries() == "FlashAttention-2 for 1 sequences"


def test_gradients_that_are_zero_are_judged_by_their_terms():
    tiny = torch.full((1, 2, 128), 1e-6)
    assert gradient_calls.gradient_error(tiny, torch.zeros(1, 2, 128)) == pytest.approx(1e-5)
    ones = torch.ones(5, 2, 128)
    assert gradient_calls.gradient_error(1.01 * ones, ones) == pytest.approx(0.01)
    assert math.isnan(gradient_calls.gradient_error(ones * math.nan, ones))
    assert math.isnan(gradient_calls.largest((0.0, math.nan, 1.0))) and gradient_calls.largest((1.0, 3.0)) == 3.0


def test_the_mixes_are_many_and_cover_what_they_should():
    made = [gradient_mix(seed) for seed in range(MIXES)]
    assert len(made) >= 200 and made == [gradient_mix(seed) for seed in range(MIXES)]
    assert {length for each in made for length in each.case.lengths} == set(LENGTHS)
    ratios = [each.case.query_heads // each.case.kv_heads for each in made]
    assert all(ratio % each.heads_per_task == 0 for ratio, each in zip(ratios, made, strict=True))
    fewer = [each for ratio, each in zip(ratios, made, strict=True) if each.heads_per_task < ratio]
    assert {each.case.ranks for each in fewer} == {1, 2, 4, 8} and {each.heads_per_task for each in fewer} >= {1, 2, 4}
    assert all(each.case.query_heads <= 16 for each in made if max(each.case.lengths) > 8192)
    assert max(each.case.query_heads for each in made) > 30


@pytest.mark.parametrize("mixed", MIXED, ids=lambda mixed: mixed.case.label)
def test_a_right_kernel_passes(kernel, mixed):
    result = run_gradient_mix(mixed, GradientBank("cpu"), repeats=3)
    assert result.passed, result
    assert result.worst.error < 1e-3 and result.spread == 0.0 and kernel.launches == 3


@pytest.mark.parametrize(
    ("spoil", "failed", "said"),
    [
        (lambda call: call.dk.copy_(call.dk.roll(1, dims=1)), (600,), ""),
        (lambda call: call.dq[:3, 0].mul_(1.5), (600,), ""),
        (lambda call: call.dv[0, 0, 0].fill_(float("nan")), (600,), ""),
        (lambda call: call.dv[-1].fill_(1.0), (), "dv: rows of no sequence are not cleared"),
        (lambda call: call.workspace.query_sums[5].fill_(1.0), (), "the sums of dQ"),
    ],
    ids=["heads", "rows", "NaN", "dummy rows", "sums"],
)
def test_a_wrong_kernel_fails_and_the_sequence_is_named(kernel, spoil, failed, said):
    kernel.spoil = lambda made: spoil(made[0])  # of rank 0, which holds a quarter of the first sequence only
    result = run_gradient_mix(MIXED[1], GradientBank("cpu"))
    assert not result.passed and result.failed == failed and said in result.detail


def test_gradients_that_change_from_call_to_call_fail(kernel):
    def spoil(made):
        if kernel.launches == 1:
            made[-1].dk.mul_(1.01)  # the last call is right

    kernel.spoil = spoil
    result = run_gradient_mix(MIXED[0], GradientBank("cpu"))
    assert not result.failed and result.spread == pytest.approx(0.01, rel=0.1) and not result.passed


def test_verdicts():
    good = {5: ((0.9e-3, 1e-4, 2e-3), (1e-4, 1e-4, 1.5e-3)), 6: ((1e-5,) * 3, (1e-4,) * 3)}
    done = gradient_outcome(good, spread=1e-5, detail="")
    assert done.passed and (done.worst.length, done.worst.name) == (5, "dq")
    late = gradient_outcome(good | {6: ((1e-5, 1.1e-3, 1e-5), (1e-4,) * 3)}, spread=0.0, detail="")
    assert late.failed == (6,) and late.worst.name == "dk" and not late.passed
    broken = gradient_outcome(good | {6: ((1.0, 1.0, math.nan), (1e-4,) * 3)}, spread=0.0, detail="")
    assert broken.failed == (6,) and broken.worst.name == "dv"
    assert not gradient_outcome(good, spread=2e-3, detail="").passed
    assert not gradient_outcome(good, spread=math.nan, detail="").passed
    assert not gradient_outcome(good, spread=0.0, detail="dirty").passed


def test_rows_and_their_summary(kernel, capsys):
    bank = GradientBank("cpu")
    rows = [gradient_mixes.gradient_row(mixed, bank) for mixed in MIXED[:2]]
    assert all(row["passed"] for row in rows) and rows[0]["heads_per_task"] == 1
    assert "2 of 2 mixes passed; worst d" in gradient_mixes.gradient_summary(rows)

    def stop(made):
        raise gradient_mixes.PeerTimeout("rank 0 waited")

    kernel.spoil = stop
    row = gradient_mixes.gradient_row(MIXED[0], bank)
    assert not row["passed"] and row["detail"] == "rank 0 waited" and "FAIL" in capsys.readouterr().out
    assert gradient_mixes.gradient_summary([row]) == "0 of 1 mixes passed"


@pytest.mark.parametrize(("factor", "passed"), [(1.0, True), (1.01, False), (math.nan, False)])
def test_errors_on_eight_ranks_are_compared_with_those_on_one(kernel, capsys, monkeypatch, factor, passed):
    def spoil(made):
        if len(made) == 8:
            made[3].dv.mul_(factor)

    kernel.spoil = spoil
    monkeypatch.setattr(gradient_mixes, "MOST_TOKENS", 130)  # two batches
    row = gradient_mixes.rank_row((1, 100, 16, 40), KIND, GradientBank("cpu"))
    assert row["passed"] == passed and kernel.launches == 4
    assert (row["ratio"] == pytest.approx(1.0)) == passed and ("dv of" in row["where"] or passed)
    assert ("PASS" if passed else "FAIL") in capsys.readouterr().out


def test_lengths_are_taken_in_batches():
    assert gradient_mixes.batches([70_000, 60_000, 50_000, 20]) == [(70_000,), (60_000, 50_000, 20)]
    assert gradient_mixes.batches([]) == []


def test_the_simple_stage(kernel, monkeypatch, capsys):
    def values(case):
        heads = (case.query_heads, case.kv_heads, case.kv_heads, case.query_heads)
        q, k, v, gradient = (torch.randn(sum(case.lengths), each, case.head_dim).to(case.dtype) for each in heads)
        return (q, k, v), gradient

    def spoil(made):
        if len(made) < kernel.placement.ranks:  # the last rank never comes
            for gradient in (made[0].dq, made[0].dk, made[0].dv):
                gradient.fill_(math.nan)
            raise gradient_mixes.PeerTimeout("rank 0 waited for a tile from rank 1")
        if len(made) == 2:  # the second case
            made[1].dq[0, 0] += 1.0

    kernel.spoil = spoil
    cases = [
        Case((30,), 1, ((0, 1),), 2, 1, head_dim=8, dtype=torch.float16),
        Case((4, 60, 1), 2, ((0, 2), (1, 1), (1, 1)), 1, 1, head_dim=8, dtype=torch.float16, strided=True),
    ]
    monkeypatch.setattr(backward, "_random", values)
    monkeypatch.setattr(backward, "WATCHED", Case((40, 3), 2, ((0, 2), (0, 1)), 2, 1, head_dim=8, dtype=torch.float16))
    monkeypatch.setattr(backward, "simple_cases", lambda: cases)
    monkeypatch.setattr(backward, "compile_kernels", lambda folder: None)
    rows = list(backward.check_gradients(None))
    assert [row["passed"] for row in rows] == [True, True, False, True]
    assert "1 head per task" in rows[1]["name"] and max(rows[0]["errors"]) < 1e-3 and rows[0]["spread"] == 0.0
    assert "dq: 1 of 65 rows off, heads [0]" in rows[2]["detail"] and rows[2]["spread"] == 0.0
    assert "rank 0 waited for a tile from rank 1" in rows[3]["message"]
    assert capsys.readouterr().out.count("PASS") == 3


def test_the_simple_cases_outcome():
    made = backward.BackwardOutcome((1e-4, 2e-3, 1e-4), (1e-4, 1.5e-3, 1e-4), 1e-5, "")
    assert made.passed and not backward.BackwardOutcome(made.errors, (1e-4,) * 3, 0.0, "").passed
    assert not backward.BackwardOutcome(made.errors, made.library, 0.1, "").passed
    assert not backward.BackwardOutcome(made.errors, made.library, 0.0, "rows off").passed
    assert not backward.BackwardOutcome((math.nan,) * 3, made.library, 0.0, "").passed
