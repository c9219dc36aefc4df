"""What the self-checks on a GPU compute and judge, with the kernel's walk in NumPy in the kernel's place."""

import argparse
import importlib.util
import itertools
import sys
from pathlib import Path

import emulation
import pytest
import torch
from attention_cases import whole_attention

from megaring.kernels.checks import calls as checks
from megaring.kernels.checks import mixes
from megaring.kernels.checks.bank import Bank, Judgement, Kind, attention_fp64, inputs, judge, query_numbers, squares
from megaring.kernels.checks.forward import Case
from megaring.kernels.checks.mixes import LENGTHS, MIXES, mix, outcome, run_mix, summary
from megaring.kernels.specialisations import every_specialisation, forward

KIND = Kind(head_dim=8, dtype=torch.float16)
CASES = [
    Case((130, 300, 1), 1, ((0, 1),) * 3, query_heads=4, kv_heads=2, head_dim=8, dtype=torch.float16),
    Case((600, 5, 140), 4, ((0, 4), (1, 1), (2, 2)), 5, 5, 8, torch.float16, strided=True, rank_multiple=8),
    Case((300, 64), 2, ((0, 2), (0, 1)), 8, 1, 8, torch.float16, causal=False),
]


@pytest.fixture
def kernel(monkeypatch):
    """Runs calls as the kernel would; ``kernel.spoil`` may change the outputs of every launch."""

    class Kernel:
        spoil = staticmethod(lambda calls: None)

        def __call__(self, domain, calls, *, softmax_scale):
            plans = [call.plan.plan for call in calls]
            q, k, v = ([getattr(call, name).double().numpy() for call in calls] for name in "qkv")
            arenas = zip(emulation.deliver(plans, k), emulation.deliver(plans, v), strict=True)
            for i, (call, arena) in enumerate(zip(calls, arenas, strict=True)):
                out, lse = emulation.attend(plans[i], q[i], k[i], v[i], arena, softmax_scale)
                call.out.copy_(torch.from_numpy(out))
                call.lse.copy_(torch.from_numpy(lse))
            self.spoil(calls)

    real = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *args, pin_memory=False, **options: real(*args, **options))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    made = Kernel()
    monkeypatch.setattr(checks, "megaring_forward", made)
    return made


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("score_bytes", [1, 3000, 1 << 20])
def test_fp64_in_blocks_of_rows(causal, score_bytes):
    q, k, v = (torch.randn(77, heads, 16).bfloat16() for heads in (6, 2, 2))
    out, lse = attention_fp64(q, k, v, causal=causal, score_bytes=score_bytes)
    wanted, wanted_lse = whole_attention(q.double(), k.double(), v.double(), [77], causal=causal)
    assert torch.allclose(out, wanted, rtol=1e-12, atol=1e-12)
    assert torch.allclose(lse, wanted_lse, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("query_heads", "kv_heads"), [(1, 1), (16, 1), (8, 8), (12, 4), (15, 3), (32, 8)])
def test_a_case_s_heads_are_those_of_the_bank(query_heads, kv_heads):
    entry = Bank("cpu").entry(50, KIND)
    q, k, v = inputs(entry, query_heads, kv_heads)
    assert (q.shape, k.shape) == ((50, query_heads, 8), (50, kv_heads, 8))
    numbers = query_numbers(query_heads, kv_heads)
    assert all(a != b for a, b in itertools.pairwise(numbers))
    wanted, wanted_lse = attention_fp64(q, k, v, causal=True)
    assert torch.allclose(entry.wanted[:, numbers], wanted, atol=1e-12)
    assert torch.allclose(entry.wanted_lse[:, numbers], wanted_lse, atol=1e-12)


def test_the_bank_gives_the_same_values_again_and_others_for_other_lengths():
    bank = Bank("cpu")
    assert bank.entry(50, KIND) is bank.entry(50, KIND)
    assert torch.equal(Bank("cpu").entry(50, KIND).q, bank.entry(50, KIND).q)
    assert not torch.equal(bank.entry(51, KIND).q[:50], bank.entry(50, KIND).q)


def test_errors_of_parts_of_a_sequence_add_up():
    entry = Bank("cpu").entry(50, KIND)
    numbers = query_numbers(4, 2)
    noise = torch.randn(50, 4, 8, dtype=torch.float64)
    out, lse = entry.wanted[:, numbers] + 0.01 * noise, entry.wanted_lse[:, numbers] + 0.5
    rows = torch.randperm(50)
    sums = sum(squares(entry, out[part], lse[part], 2, part) for part in (rows[:13], rows[13:]))
    judged = judge(entry, sums, 4, 2)
    assert judged.output == pytest.approx(float(0.01 * noise.norm() / entry.wanted[:, numbers].norm()))
    assert judged.lse == pytest.approx(0.5 * 200**0.5 / float(entry.wanted_lse[:, numbers].norm()))
    rounded = float((entry.wanted.half().double() - entry.wanted).norm() / entry.wanted.norm())
    assert 0.5 * rounded < judged.library < 4 * rounded  # a library that computes in fp32 and rounds


def test_an_lse_near_zero_counts_as_one():
    entry = Bank("cpu").entry(1, KIND)
    lse = entry.wanted_lse[:, [0]] + 1e-3
    sums = squares(entry, entry.wanted[:, [0]], lse, 1)
    sums[3] = 1e-12
    assert judge(entry, sums, 1, 1).lse == pytest.approx(1e-3)


def test_the_mixes_are_many_and_cover_what_they_should():
    made = [mix(seed) for seed in range(MIXES)]
    assert MIXES >= 200 and len(LENGTHS) == len(set(LENGTHS)) == 50 and max(LENGTHS) == 40_000
    assert {length for case in made for length in case.lengths} == set(LENGTHS)
    assert {case.ranks for case in made} == {size for case in made for _, size in case.groups} == {1, 2, 4, 8}
    assert {case.kv_heads for case in made} == {1, 2, 3, 4, 8}
    assert all(len(set(case.lengths)) == len(case.lengths) for case in made)
    assert made == [mix(seed) for seed in range(MIXES)]
    parts = [seed for part in range(3) for seed in range(part, MIXES, 3)]
    assert sorted(parts) == list(range(MIXES))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.label)
def test_a_right_kernel_passes(kernel, case):
    result = run_mix(case, Bank("cpu"), repeats=3)
    assert result.passed, result
    assert result.worst.output < 1e-3 and result.worst_lse < 1e-6


@pytest.mark.parametrize(
    ("spoil", "failed", "said"),
    [
        (lambda call: call.out.copy_(call.out.roll(1, dims=1)), (600,), ""),
        (lambda call: call.out[:3, 0].mul_(1.5), (600,), ""),
        (lambda call: call.out[0, 0, 0].fill_(float("nan")), (600,), ""),
        (lambda call: call.lse[0].add_(0.1), (600,), ""),
        (lambda call: call.out[-1].fill_(1.0), (), "not cleared"),
    ],
    ids=["heads", "rows", "NaN", "LSE", "dummy rows"],
)
def test_a_wrong_kernel_fails_and_the_sequence_is_named(kernel, spoil, failed, said):
    kernel.spoil = lambda calls: spoil(calls[0])  # of rank 0, which holds a quarter of the first sequence only
    result = run_mix(CASES[1], Bank("cpu"))
    assert not result.passed and result.failed == failed and said in result.detail


def test_results_that_change_from_call_to_call_fail(kernel):
    launches = []

    def spoil(calls):
        launches.append(1)
        calls[-1].lse[0, 0] += 1e-7 * len(launches)

    kernel.spoil = spoil
    result = run_mix(CASES[0], Bank("cpu"))
    assert not result.failed and not result.repeatable and not result.passed


def test_verdicts():
    good = Judgement(0.9e-3, 1e-7, 1e-4)
    assert outcome({5: good, 6: Judgement(2e-3, 1e-7, 1.5e-3)}, repeatable=True, dirty=False).passed
    late = outcome({5: good, 6: Judgement(2.3e-3, 1e-7, 1.5e-3)}, repeatable=True, dirty=False)
    assert late.failed == (6,) and late.worst_length == 6
    broken = outcome({5: good, 7: Judgement(float("nan"), float("nan"), 1e-3)}, repeatable=True, dirty=False)
    assert broken.failed == (7,) and broken.worst_length == 7 and broken.worst_lse != broken.worst_lse
    assert outcome({5: Judgement(1e-4, 3e-6, 1e-4)}, repeatable=True, dirty=False).failed == (5,)


def test_the_summary_tells_the_worst():
    rows = [
        {"passed": True, "output": 2e-3, "library": 1.9e-3, "lse": 1e-7, "worst_length": 31},
        {"passed": False, "output": 5e-3, "library": 2e-3, "lse": 3e-7, "worst_length": 64},
        {"passed": False, "detail": "stopped"},
    ]
    assert summary(rows) == (
        "1 of 3 mixes passed; worst output error 5.00e-03, worst ratio to the library 2.50 (64 tokens), "
        "worst LSE error 3.0e-07"
    )
    assert summary(rows[2:]) == "0 of 1 mixes passed"


def test_rows_tell_a_peer_that_never_came(kernel, capsys):
    def stop(calls):
        raise mixes.PeerTimeout("rank 0 waited")

    kernel.spoil = stop
    row = mixes.row_of(CASES[0], Bank("cpu"))
    assert not row["passed"] and row["detail"] == "rank 0 waited" and "FAIL" in capsys.readouterr().out


def test_the_variant_with_delays_is_another_kernel_and_not_one_to_ship():
    plain, delayed = (forward(64, bfloat16=False, causal=True, delays=delays) for delays in (False, True))
    assert delayed.defines == (*plain.defines, ("MEGARING_DELAYS", 1)) and "delays=1" in delayed.label
    assert plain in every_specialisation() and delayed not in every_specialisation()


@pytest.fixture(scope="module")
def script():
    path = Path(__file__).resolve().parents[3] / "scripts" / "check_fused.py"
    spec = importlib.util.spec_from_file_location("check_fused", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_parts_of_the_suite(script):
    assert script._part("2/3") == (2, 3)
    for wrong in ("0/3", "4/3", "1", "a/b"):
        with pytest.raises(argparse.ArgumentTypeError, match=f"'{wrong}' is no part"):
            script._part(wrong)
