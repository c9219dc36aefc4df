"""What goes wrong in systems like this one: masks, isolation, uneven lengths, counts, NaN, through the whole model."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from model_case import MODEL, TRAIN, Batch, Case, Outcome, assemble, gradients_of, prepare, run, worst_difference

from megaring.megatron import parallel
from megaring.megatron.config import ParallelConfig
from megaring.megatron.loss import unwrap

PLAIN = replace(MODEL, moe_aux_loss_coeff=0.0, moe_z_loss_coeff=None)  # nothing couples sequences
LENGTHS = (40, 21, 9)
GROUPS = {4: ((0, 4), (2, 2), (1, 1)), 2: ((0, 2), (1, 1), (0, 1))}


def domain(ranks: int, **sizes) -> ParallelConfig:
    return ParallelConfig(attention_backend="ring", context_parallel_size=ranks, **sizes)


def compare(pool, batch: Batch, ranks: int, model=MODEL, **sizes) -> tuple[list[Outcome], Outcome]:
    """The gradients of one process and of a domain; they must be the same."""
    case = Case(((batch,),), domain(ranks, **sizes), model=model)
    outcomes = pool.run(ranks * case.layout.tensor_model_parallel_size, run, case)
    expected = pool.run(1, run, case.on_one_process())[0]
    error, where = worst_difference(assemble(outcomes), assemble([expected]), idle_experts=True)
    assert error < 5e-6, where
    assert outcomes[0].evaluation.loss == pytest.approx(expected.evaluation.loss, abs=1e-6)
    return outcomes, expected


@pytest.mark.parametrize("ranks", [2, 4])
def test_one_supervised_token(pool, ranks):
    batch = Batch(LENGTHS, GROUPS, targets=((), (13,), ()))
    _, expected = compare(pool, batch, ranks)
    assert expected.evaluation.target_tokens == 1
    assert expected.evaluation.loss == pytest.approx(expected.gradient_losses, abs=1e-6)


def test_ranks_whose_tokens_are_all_masked(pool):
    # Only the last sequence, all of it on rank 1, has targets: three ranks contribute exactly nothing.
    batch = Batch(LENGTHS, GROUPS, targets=((), (), tuple(range(1, 9))))
    outcomes, _ = compare(pool, batch, 4)
    assert [outcome.gradient_losses for outcome in outcomes[:1] + outcomes[2:]] == [0.0, 0.0, 0.0]
    assert outcomes[1].gradient_losses > 0
    assert all(outcome.evaluation.target_tokens == 8 for outcome in outcomes)


@pytest.mark.parametrize("tile", [1, 128])
def test_698_tokens_on_four_ranks(pool, tile):
    batch = Batch((698,), {4: ((0, 4),)}, tile=tile)
    outcomes, _ = compare(pool, batch, 4)
    assert [outcome.rows for outcome in outcomes] == [175, 175, 174, 174]
    assert outcomes[0].evaluation.target_tokens == 697
    assert outcomes[0].evaluation.tokens == 698


def test_rank_without_tokens(pool):
    batch = Batch((20, 7), {4: ((0, 2), (2, 1))})
    outcomes, _ = compare(pool, batch, 4, expert_model_parallel_size=4)
    assert [outcome.rows for outcome in outcomes] == [10, 10, 7, 1]
    assert outcomes[0].evaluation.tokens == 27


def all_masked_step(rank: int, world_size: int) -> dict:
    layout = domain(world_size, expert_model_parallel_size=world_size)
    batch = Batch(LENGTHS, GROUPS)
    case = Case(((batch,),), layout, train=replace(TRAIN, lr_warmup_iters=2))
    step, batches = prepare(rank, world_size, case)
    masked = [replace(batch, targets=((), (), ())).microbatch(layout, rank)]
    weights = [p.detach().clone() for p in step.chunks[0].parameters()]
    first = step(batches)
    moved = [p.detach().clone() for p in step.chunks[0].parameters()]
    with_nothing = step(masked)
    unmoved = all(torch.equal(p, q) for p, q in zip(step.chunks[0].parameters(), moved, strict=True))
    after = step(batches)
    parallel.stop()
    changed = any(not torch.equal(p, q) for p, q in zip(weights, moved, strict=True))
    return {"first": first, "masked": with_nothing, "after": after, "unmoved": unmoved, "changed": changed}


def test_all_masked_step(pool):
    for seen in pool.run(2, all_masked_step):
        masked = seen["masked"]
        assert (masked.loss, masked.target_tokens, masked.tokens, masked.skipped) == (0.0, 0, sum(LENGTHS), True)
        assert masked.grad_norm == 0.0
        assert seen["unmoved"]
        assert not seen["first"].skipped
        assert not seen["after"].skipped
        assert seen["first"].learning_rate == 0.0  # warm-up starts from 0
        assert not seen["changed"]
        assert seen["after"].learning_rate == masked.learning_rate == TRAIN.lr / 2  # a skipped step takes no turn
        assert seen["after"].loss == seen["first"].loss


def layer_outputs(rank: int, world_size: int, case: Case) -> tuple[list[dict], Outcome]:
    """Per layer and (sequence, position), the hidden state that this rank computes; and its gradients."""
    step, batches = prepare(rank, world_size, case)
    layers: list[torch.Tensor] = []
    for layer in unwrap(step.chunks[0]).decoder.layers:
        layer.register_forward_hook(lambda _m, _i, out: layers.append(out[0].detach().clone()))
    losses = step.gradients(batches, force_all_reduce=True)
    outcome = Outcome(gradients_of(step), float(sum(losses)))
    parallel.stop()
    shards = batches[0].shards
    owners = np.repeat(shards.sequences, np.diff(shards.cu_seqlens))
    keys = list(zip(owners.tolist(), shards.positions.tolist(), strict=True))
    return [dict(zip(keys, layer[:, 0].numpy(), strict=False)) for layer in layers], outcome


def test_documents_are_isolated(pool):
    # Only document 0 is supervised; a token of document 1 changes.
    batch = Batch(LENGTHS, GROUPS, targets=(tuple(range(40)), (), ()))
    edited = replace(batch, edits=((1, 3, 77),))
    before, after = (
        pool.run(4, layer_outputs, Case(((b,),), domain(4, expert_model_parallel_size=2), model=PLAIN))
        for b in (batch, edited)
    )
    for rank in range(4):
        for old, new in zip(before[rank][0], after[rank][0], strict=True):
            for (sequence, position), value in old.items():
                difference = np.abs(value - new[sequence, position]).max()
                if sequence == 1 and position >= 3:
                    assert difference > 1e-4, (sequence, position)
                else:
                    assert difference < 1e-6, (sequence, position)
    old, new = (assemble([outcome for _, outcome in side]) for side in (before, after))
    for name, gradient in old.items():
        assert np.abs(gradient - new[name]).max() <= 2e-6 * np.abs(gradient).max(), name


def test_first_token_reaches_the_other_ranks_in_every_layer(pool):
    batch = Batch((40,), {4: ((0, 4),)})
    before, after = (
        pool.run(4, layer_outputs, Case(((b,),), domain(4), model=PLAIN))
        for b in (batch, replace(batch, edits=((0, 0, 77),)))
    )
    for rank in range(1, 4):  # rank 0 holds token 0
        layers = list(zip(before[rank][0], after[rank][0], strict=True))
        assert len(layers) == MODEL.num_layers
        for old, new in layers:
            last = max(old)
            assert last[1] >= 20
            assert np.abs(old[last] - new[last]).max() > 1e-4


def with_nan_rows(rank: int, world_size: int, case: Case, poison: bool) -> Outcome:
    """Gradients when all that the output layer could see of the rows that do not count is NaN."""
    step, batches = prepare(rank, world_size, case)
    gpt = unwrap(step.chunks[0])

    def spoil(_module, _inputs, hidden):
        from megatron.core import parallel_state

        ranks, here = case.layout.tensor_model_parallel_size, parallel_state.get_tensor_model_parallel_rank()
        masked = (batches[0].loss_mask[0] == 0).chunk(ranks)[here]
        return hidden.masked_fill(masked[:, None, None], float("nan"))

    if poison:
        gpt.decoder.register_forward_hook(spoil)
    losses = step.gradients(batches)
    outcome = Outcome(gradients_of(step), float(sum(losses)))
    parallel.stop()
    return outcome


@pytest.mark.parametrize("tensor", [1, 2])
def test_nan_logits_of_rows_that_do_not_count(pool, tensor):
    batch = Batch(LENGTHS, GROUPS, targets=(tuple(range(0, 40, 3)), (5,), ()))
    layout = domain(2, tensor_model_parallel_size=tensor)
    case = Case(((batch,),), layout)
    clean, spoilt = (pool.run(2 * tensor, with_nan_rows, case, poison) for poison in (False, True))
    assert [o.gradient_losses for o in spoilt] == [o.gradient_losses for o in clean]
    old, new = assemble(clean), assemble(spoilt)
    for name in old:
        assert np.array_equal(old[name], new[name]), name


def refusals(rank: int, world_size: int) -> tuple[str, str]:
    """Messages of a step with too many microbatches and of one with a spoilt weight."""
    layout = domain(world_size)
    step, batches = prepare(rank, world_size, Case(((Batch(LENGTHS, GROUPS),),), layout))
    messages = []
    try:
        step(batches * 2)
    except ValueError as error:
        messages.append(str(error))
    if rank == 1:
        with torch.no_grad():
            unwrap(step.chunks[0]).decoder.final_layernorm.weight[0] = float("nan")
    try:
        step(batches)
    except FloatingPointError as error:
        messages.append(str(error))
    parallel.stop()
    return tuple(messages)


def test_refusals_are_the_same_on_every_rank(pool):
    for count, nan in pool.run(2, refusals):
        assert "got 2 microbatches but was made for 1" in count
        assert nan.startswith("the loss is nan")


def schedule(rank: int, world_size: int) -> list[float]:
    train = replace(TRAIN, lr_decay_iters=6, lr=1.0, min_lr=0.2, lr_warmup_iters=2, weight_decay=0.0)
    step, batches = prepare(rank, world_size, Case(((Batch((9,), {}),),), train=train))
    rates = [step(batches).learning_rate for _ in range(7)]
    parallel.stop()
    return rates


def test_learning_rate_warms_up_and_decays(pool):
    cosine = [0.2 + 0.8 * (0.5 + 0.5 * np.cos(np.pi * x / 4)) for x in range(5)]
    assert pool.run(1, schedule)[0] == pytest.approx([0.0, 0.5, *cosine])
