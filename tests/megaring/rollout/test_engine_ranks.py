"""The engine over real ranks: the same tokens on 1, 2 and 4 of them, in any layout and through all switches."""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from rollout_case import MEMORY, MODEL, VOCABULARY, make_model, make_runner, plain_logits

from megaring.megatron import parallel
from megaring.rollout.driver import Driver, follow
from megaring.rollout.engine import KEEP, RECOMPUTE, Engine, EngineFailed
from megaring.rollout.intake import EngineConfig
from megaring.rollout.request import SamplingParams
from megaring.rollout.steering import fixed, in_turn

CONFIG = EngineConfig(max_context=320, max_rows=64, max_running=6, eos=(7,), keep_prefixes=True, rebalance_every=5)
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, experts=True, prompt_logprobs=0)


def requests(longer=0):
    """Prompts with what is asked of them: equal beginnings, several samples, all kinds of parameters."""
    random = np.random.default_rng(2)
    common = random.integers(0, VOCABULARY, 130).tolist()
    asked = [(common[:100], GREEDY)]
    for number, length in enumerate((3, 140, 64, 75, 129)):
        prompt = random.integers(0, VOCABULARY, length).tolist() if number % 2 else [*common, number][:length]
        params = SamplingParams(
            max_tokens=10 + 4 * number + longer, seed=number, n=1 + number % 3, top_k=20 * (number % 2)
        )
        asked.append((prompt, params))
    return asked


def load_other(runner, ranks):
    """Weights of a model with another seed, for the refit."""
    newer = make_model(ranks, MODEL, 4, torch.float64)

    def load(version):
        with torch.no_grad():
            for old, new in zip(runner.decoder.model.parameters(), newer.parameters(), strict=True):
                old.copy_(new)

    return load


def generate(rank, world_size, steering, live=None, sleeps=False, longer=0, **changes):
    """What rank 0 gets: (token ids, log-probabilities, versions, experts, reason) by request and sample, and the steps
    and switches that it took.
    """
    torch.set_num_threads(1)
    start = steering if steering != "turn" else "TP"
    runner = make_runner(world_size, MODEL, layout=start, memory=changes.pop("memory", MEMORY))
    load = load_other(runner, world_size) if live else None
    if rank:
        follow(runner, load)
        parallel.stop()
        return None
    driver = Driver(runner, load)
    steer = in_turn(3) if steering == "turn" else fixed(steering)
    engine = Engine(driver, replace(CONFIG, **changes), steer=steer)
    waiting, news = requests(longer), []
    for step in range(2000):
        if waiting and step % 4 == 0:
            engine.add(*waiting.pop(0))
        if step == 9:
            engine.abort(1)
        if live and step == 14:
            engine.refit(1, live)
        if sleeps and step == 11:
            engine.sleep()
            assert not runner.ledger.requests
            assert engine.step() == []
            engine.wake()
        news += engine.step()
        if not waiting and not engine.has_work:
            break
    driver.stop()
    assert set(runner.ledger.requests) == set(engine._queues.retained)
    parallel.stop()
    outputs = {}
    for delta in news:
        if delta.finished is not None:
            done = delta.finished
            outputs[delta.request, delta.sample] = (
                done.token_ids,
                [(token.logprob, token.sampling_logprob) for token in done.tokens],
                [token.version for token in done.tokens],
                done.experts.tolist() if done.experts is not None else None,
                done.finish_reason,
            )
    prompts = {d.request: d.completed.prompt_logprobs for d in news if d.completed and d.completed.prompt_logprobs}
    return outputs, prompts, dict(engine.metrics.switches), engine.metrics.preempted


@pytest.fixture(scope="module")
def alone(pool):
    """One process, one layout."""
    return pool.run(1, generate, "TP")[0]


def check_equal(found, expected, but=()):
    assert found.keys() == expected.keys()
    for key in expected.keys() - {(request, 0) for request in but}:
        tokens, logprobs, versions, experts, reason = expected[key]
        assert found[key][0] == tokens, key
        np.testing.assert_allclose(found[key][1], logprobs, rtol=0, atol=1e-10)
        assert found[key][2:] == (versions, experts, reason)


@pytest.mark.parametrize(("ranks", "steering"), [(1, "turn"), (2, "turn"), (4, "turn"), (2, "DOP")])
def test_every_layout_and_every_switch_gives_the_same(pool, alone, ranks, steering):
    outputs, prompts, switches, _ = pool.run(ranks, generate, steering)[0]
    check_equal(outputs, alone[0], but=(1,))  # how far the aborted one came depends on nothing that is promised
    assert outputs[1, 0][4] == alone[0][1, 0][4] == "abort"
    for request, expected in alone[1].items():
        np.testing.assert_allclose(
            [each.logprob for each in prompts[request]], [each.logprob for each in expected], rtol=0, atol=1e-10
        )
    if steering == "turn":
        assert {("TP", "DP"), ("DP", "CP"), ("CP", "DOP"), ("DOP", "TP")} <= set(switches)


def test_greedy_tokens_and_log_probabilities_are_those_of_a_plain_forward_pass(pool, alone):
    prompt, params = requests()[0]
    tokens, logprobs, _, experts, reason = alone[0][0, 0]
    sequence = np.array(prompt + tokens)
    (logits,) = pool.run(1, plain_logits, MODEL, [sequence])[0]
    values = torch.from_numpy(logits).log_softmax(dim=-1).numpy()
    places = np.arange(len(prompt) - 1, len(sequence) - 1)
    assert (values[places].argmax(axis=1) == tokens).all()
    np.testing.assert_allclose([each[0] for each in logprobs], values[places, tokens], atol=1e-10)
    known = [each.logprob for each in alone[1][0]]
    np.testing.assert_allclose(known, values[np.arange(len(prompt) - 1), prompt[1:]], atol=1e-10)
    assert np.array(experts).shape == (len(sequence) - 1, MODEL.num_layers, 2)
    assert (reason, len(tokens)) == ("length", params.max_tokens)


@pytest.mark.parametrize("live", [KEEP, RECOMPUTE])
def test_a_refit_amid_requests(pool, live):
    """The same on 1 rank in one layout and on 2 through switches; tokens of both versions are there."""
    expected = pool.run(1, generate, "TP", live)[0][0]
    found = pool.run(2, generate, "turn", live)[0][0]
    check_equal(found, expected, but=(1,))
    assert any(set(each[2]) == {0, 1} for each in expected.values())


def test_sleep_changes_no_token(pool, alone):
    check_equal(pool.run(2, generate, "turn", sleeps=True)[0][0], alone[0], but=(1,))


def test_preemption_changes_no_token(pool):
    """Six pages, where the longest request alone grows to five."""
    expected = pool.run(1, generate, "TP", longer=130)[0][0]
    small = {"memory": 400_000, "layouts": ("DP",), "expected_growth": 0.0}
    outputs, _, _, preempted = pool.run(1, generate, "DP", longer=130, **small)[0]
    check_equal(outputs, expected, but=(1,))
    assert preempted > 0


def deserted(rank, world_size):
    """Rank 1 dies after some steps; rank 0 says so, and so does its engine from then on."""
    runner = make_runner(world_size, MODEL)
    if rank:
        for _ in range(3):
            _, plan = runner.ranks.broadcast(None)
            runner.step(plan)
        os._exit(3)
    engine = Engine(Driver(runner), CONFIG)
    engine.add([1, 2, 3], GREEDY)
    with pytest.raises(EngineFailed, match=r"PeerLost: rank 0 of 2: .* failed, a peer has died or is late"):
        while engine.has_work:
            engine.step()
    with pytest.raises(EngineFailed, match="PeerLost"):
        engine.add([1], GREEDY)
    raise RuntimeError(f"the engine noticed after {engine.metrics.drawn} tokens")


def test_a_rank_that_dies_ends_the_engine_with_its_reason(pool):
    with pytest.raises(AssertionError, match="the engine noticed after 3 tokens"):
        pool.run(2, deserted, timeout=40)
