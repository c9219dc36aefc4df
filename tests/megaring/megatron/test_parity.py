"""Every layout of a model gives the gradients and the losses of one process with the same sequences."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from model_case import MODEL, Batch, Case, assemble, run, worst_difference

from megaring.megatron.config import ParallelConfig

STEPS = 4
# Lengths that nothing divides; degrees 4, 2, 1, 1 on four ranks.
MIXED = Batch(
    (61, 37, 23, 9, 5),
    {4: ((0, 4), (0, 2), (2, 1), (3, 1), (3, 1)), 2: ((0, 2), (0, 1), (1, 1), (1, 1), (0, 2))},
)
SECOND = Batch((45, 30, 8), {4: ((0, 4), (2, 2), (0, 1)), 2: ((0, 2), (1, 1), (0, 1))}, seed=1)
EMPTY_RANK = Batch((20, 7), {4: ((0, 2), (2, 1)), 2: ((1, 1), (1, 1))}, seed=2)


def layout(**sizes) -> ParallelConfig:
    return ParallelConfig(attention_backend="ring", **sizes)


CP4 = {"context_parallel_size": 4}
LAYOUTS = {
    "cp4-reference": Case(((MIXED,),), ParallelConfig(attention_backend="reference", **CP4)),
    "cp4": Case(((MIXED,),), layout(**CP4)),
    "cp4-ep2": Case(((MIXED, SECOND, EMPTY_RANK),), layout(**CP4, expert_model_parallel_size=2)),
    "cp4-ep4": Case(((MIXED,),), layout(**CP4, expert_model_parallel_size=4)),
    "cp4-ep2-grouped-experts": Case(
        ((MIXED, EMPTY_RANK),),
        layout(**CP4, expert_model_parallel_size=2),
        model=replace(MODEL, moe_grouped_gemm=True),
    ),
    "cp4-ep2-recompute": Case(
        ((MIXED, SECOND, EMPTY_RANK),),
        layout(**CP4, expert_model_parallel_size=2),
        model=replace(MODEL, recompute_granularity="full"),
    ),
    "tp2-cp2-ep2": Case(
        ((MIXED, EMPTY_RANK),),
        layout(tensor_model_parallel_size=2, context_parallel_size=2, expert_model_parallel_size=2),
    ),
    "pp2-cp2": Case(((MIXED, SECOND),), layout(pipeline_model_parallel_size=2, context_parallel_size=2)),
    "pp2-tp2": Case(((MIXED, EMPTY_RANK),), layout(pipeline_model_parallel_size=2, tensor_model_parallel_size=2)),
    "dp2-cp2-ep4": Case(((MIXED,), (SECOND,)), layout(context_parallel_size=2, expert_model_parallel_size=4)),
    "dp2-cp2-overlap": Case(
        ((MIXED, EMPTY_RANK), (SECOND, MIXED)), layout(context_parallel_size=2, overlap_grad_reduce=True)
    ),
    "cp4-ep2-distributed-optimizer": Case(
        ((MIXED, EMPTY_RANK),),
        layout(**CP4, expert_model_parallel_size=2, use_distributed_optimizer=True, overlap_grad_reduce=True),
    ),
    "cp4-dense-tied": Case(
        ((MIXED,),), layout(**CP4), model=replace(MODEL, num_experts=None, untie_embeddings_and_output_weights=False)
    ),
    "pp2-cp2-tied": Case(
        ((MIXED,),),
        layout(pipeline_model_parallel_size=2, context_parallel_size=2),
        model=replace(MODEL, untie_embeddings_and_output_weights=False),
    ),
}


@pytest.fixture(scope="module")
def one_process(pool):
    """Outcomes of one process, each computed once."""

    @cache
    def compute(index: int):
        return pool.run(1, run, references[index])[0]

    references: list[Case] = []

    def outcome(case: Case):
        wanted = replace(case, steps=STEPS).on_one_process()
        if wanted not in references:
            references.append(wanted)
        return compute(references.index(wanted))

    return outcome


@pytest.mark.parametrize("name", LAYOUTS)
def test_gradients_and_losses_are_those_of_one_process(pool, one_process, name):
    case = replace(LAYOUTS[name], steps=STEPS)
    expected = one_process(case)
    outcomes = pool.run(4, run, case)

    error, where = worst_difference(assemble(outcomes), assemble([expected]))
    assert error < 5e-6, where
    for outcome in outcomes:
        assert outcome.evaluation.loss == pytest.approx(expected.evaluation.loss, abs=1e-6)
        assert outcome.evaluation.target_tokens == expected.evaluation.target_tokens
        for report, reference in zip(outcome.reports, expected.reports, strict=True):
            assert report.loss == pytest.approx(reference.loss, abs=1e-6)
            assert report.grad_norm == pytest.approx(reference.grad_norm, rel=1e-5)
            assert (report.aux_loss is None) == (report.z_loss is None) == (case.model.num_experts is None)
            if report.aux_loss is not None:
                assert report.aux_loss == pytest.approx(reference.aux_loss, rel=1e-5)
                assert report.z_loss == pytest.approx(reference.z_loss, rel=1e-5)
            counts = (report.tokens, report.target_tokens, report.sum_squared_lengths)
            assert counts == (reference.tokens, reference.target_tokens, reference.sum_squared_lengths)
    assert expected.reports[-1].loss < expected.reports[0].loss
