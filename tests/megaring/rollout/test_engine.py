"""The engine over a model that notices every wrong, lost, repeated or stale cache entry, against single generation."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from fake_model import PAGES, POISON, VOCABULARY, FakeExecutor, expected, experts_of, logits_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megaring.rollout.engine import KEEP, RECOMPUTE, Engine, EngineFailed
from megaring.rollout.intake import EngineConfig
from megaring.rollout.request import Overloaded, RequestError, SamplingParams
from megaring.rollout.sampling import Draw, sample
from megaring.rollout.steering import in_turn

CONFIG = EngineConfig(max_context=384, max_rows=96, max_running=6, max_logits=20, expected_growth=0.3)
EOS = 3


@pytest.fixture(autouse=True)
def one_thread():
    """Many tiny operations: more threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def prompt_of(seed, length):
    return np.random.default_rng(seed).integers(0, VOCABULARY - 1, length).tolist()


def drain(engine, collected=None):
    """Step until nothing is left; deltas by (request, sample)."""
    collected = {} if collected is None else collected
    for _ in range(5000):
        if not engine.has_work:
            return collected
        gather(engine.step(), collected)
    raise AssertionError("the engine does not come to an end")


def gather(deltas, collected):
    for delta in deltas:
        assert not ended(collected, delta)
        collected.setdefault((delta.request, delta.sample), []).append(delta)
    return collected


def ended(collected, delta):
    return any(each.finished for each in collected.get((delta.request, delta.sample), []))


def outputs(collected):
    """Finished samples by (request, sample); their deltas must add up to them."""
    found = {}
    for key, deltas in collected.items():
        last = deltas[-1].finished
        if last is None:
            continue
        assert tuple(token for delta in deltas for token in delta.tokens) == last.tokens
        if last.text is not None:
            assert "".join(delta.text for delta in deltas) == last.text
        found[key] = last
    return found


def check(output, prompt, params, seed, eos=(), version=0):
    drawn = expected(prompt, params, seed, output.index, eos, version)
    assert [t.id for t in output.tokens] == [d.token for d in drawn]
    for token, draw in zip(output.tokens, drawn, strict=True):
        assert (token.logprob, token.sampling_logprob) == pytest.approx((draw.logprob, draw.sampling_logprob))
        assert token.alternatives == draw.alternatives
        assert token.version == version


@st.composite
def traffic(draw):
    """A script: at which step which request arrives or something happens to it or to the worker."""
    script = []
    for number in range(draw(st.integers(1, 7))):
        params = SamplingParams(
            max_tokens=draw(st.integers(1, 50)),
            min_tokens=draw(st.integers(0, 1)),
            temperature=draw(st.sampled_from([0.0, 0.7, 1.3])),
            top_k=draw(st.sampled_from([0, 5])),
            top_p=draw(st.sampled_from([1.0, 0.8])),
            n=draw(st.sampled_from([1, 1, 2, 4])),
            seed=draw(st.integers(0, 2**40)),
            ignore_eos=draw(st.booleans()),
            logprobs=draw(st.integers(0, 2)),
            prompt_logprobs=draw(st.sampled_from([None, None, 2])),
            experts=draw(st.booleans()),
        )
        same = draw(st.booleans())  # many requests have the same long beginning
        length = draw(st.integers(1, 200))
        prompt = (prompt_of(0, 130) + prompt_of(number, length))[:length] if same else prompt_of(number + 50, length)
        script.append((draw(st.integers(0, 60)), "add", (prompt, params)))
    for _ in range(draw(st.integers(0, 6))):
        kind = draw(st.sampled_from(["abort", "abort", "pause", "sleep"]))
        script.append((draw(st.integers(0, 120)), kind, draw(st.integers(0, 9))))
    return sorted(script, key=lambda event: event[0])


def play(engine, script):
    """Run a script to its end; returns deltas, and what was asked by request."""
    collected, asked, aborted, rests = {}, {}, set(), {}
    script = list(script)
    for step in range(10_000):
        while script and script[0][0] <= step:
            _, kind, what = script.pop(0)
            if kind == "add":
                asked[engine.add(*what)] = what
            elif kind == "abort":
                if engine.abort(what) is not None:
                    aborted.add(what)
            else:
                rests[step + what] = kind
                engine.pause() if kind == "pause" else engine.sleep()
        if rests and step >= max(rests):
            rests.clear()
            engine.wake()
            engine.resume()
        gather(engine.step(), collected)
        assert engine.running <= CONFIG.max_running
        if not script and not rests and not engine.has_work:
            return collected, asked, aborted
    raise AssertionError("the engine does not come to an end")


def test_a_switch_is_prepared_a_step_ahead_or_not():
    for prepares, expected_switches in (
        (True, [(4, "DP"), (7, "CP"), (10, "DOP")]),
        (False, [(3, "DP"), (6, "CP"), (9, "DOP")]),
    ):
        executor = FakeExecutor(2, "TP", dict.fromkeys(PAGES, 50))
        engine = Engine(executor, replace(CONFIG, prepare_switches=prepares), steer=in_turn(3))
        engine.add([1, 2], SamplingParams(max_tokens=11, ignore_eos=True))
        drain(engine)
        switched = [(plan.step, plan.switch_to) for plan in executor.plans if plan.switch_to]
        assert switched == expected_switches
        prepared = [(plan.step + 1, plan.prepare) for plan in executor.plans if plan.prepare]
        assert prepared == (switched if prepares else [])


@pytest.mark.parametrize("prepares", [True, False])
def test_a_switch_without_room_waits_with_its_reason(prepares):
    """Under DP an owner has room for 64 tokens only; the prompt has 100."""
    executor = FakeExecutor(2, "TP", {**PAGES, "DP": 1})
    engine = Engine(executor, replace(CONFIG, prepare_switches=prepares), steer=lambda view: "DP")
    params = SamplingParams(max_tokens=4, n=2, seed=1, ignore_eos=True)
    engine.add(prompt_of(1, 100), params)
    found = outputs(drain(engine))
    check(found[0, 1], prompt_of(1, 100), params, 1)
    reasons = [step.deferred for step in engine.metrics.steps]
    assert reasons[0] == "DP has no room for 1 sequences that run in TP"
    assert all(reasons) and not engine.metrics.switches


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(traffic(), st.sampled_from(["stay", "turn"]), st.sampled_from(list(PAGES)), st.booleans(), st.integers(1, 3))
def test_no_token_is_lost_repeated_or_reordered(script, steering, layout, keep, ranks):
    """Whatever arrives, leaves, waits, is preempted, sleeps or switches: every sample is what it would be alone."""
    executor = FakeExecutor(ranks, layout)
    config = replace(CONFIG, keep_prefixes=keep, eos=(EOS,), rebalance_every=4)
    engine = Engine(executor, config, steer=in_turn(3) if steering == "turn" else None)
    collected, asked, aborted = play(engine, script)
    found = outputs(collected)
    assert {request for request, _ in found} == set(asked)
    assert len(found) == sum(params.n for _, params in asked.values())
    for (request, _), output in found.items():
        prompt, params = asked[request]
        if request not in aborted:
            assert output.finish_reason in ("stop", "length")
            check(output, prompt, params, params.seed, (EOS,))
            if params.experts:
                seen = (prompt + output.token_ids)[:-1]
                assert output.experts.tolist() == [experts_of(token, i) for i, token in enumerate(seen)]
        elif output.finish_reason == "abort":
            alone = expected(prompt, params, params.seed, output.index, (EOS,))
            assert output.token_ids == [drawn.token for drawn in alone][: len(output.tokens)]
    for deltas in collected.values():
        if (done := deltas[-1].completed) is not None and done.request not in aborted:
            prompt, params = asked[done.request]
            check_prompt(done, prompt, params)
    assert executor.most_rows <= CONFIG.max_rows
    kept = set(engine._queues.retained)
    assert set(executor.cache) == kept and (keep or not kept)
    assert not engine.live and engine.waiting == engine.running == 0


def check_prompt(done, prompt, params):
    if params.prompt_logprobs is None:
        assert done.prompt_logprobs is None
        return
    assert [each.id for each in done.prompt_logprobs] == prompt[1:]
    for place, each in enumerate(done.prompt_logprobs, start=1):
        logits = logits_of([(token, 0) for token in prompt[:place]])
        values = logits - np.log(np.exp(logits).sum())
        assert each.logprob == pytest.approx(values[each.id])
        assert [token for token, _ in each.alternatives] == np.argsort(-values, kind="stable")[:2].tolist()


@pytest.mark.parametrize("live", [KEEP, RECOMPUTE])
def test_refit(live):
    """Tokens carry the version that made them; the history of live requests is kept or computed anew, as said."""
    executor = FakeExecutor(2)
    engine = Engine(executor, replace(CONFIG, keep_prefixes=True))
    params = SamplingParams(max_tokens=12, seed=5, n=2)
    prompt = prompt_of(1, 100)
    engine.add(prompt, params)
    collected = {}
    while sum(len(deltas) for deltas in collected.values()) < 8:
        gather(engine.step(), collected)
    engine.refit(7, live)
    late = engine.add(prompt, params)  # begins with the same pages, which it must not share
    drain(engine, collected)
    found = outputs(collected)
    for index in range(2):
        versions = [token.version for token in found[0, index].tokens]
        assert versions == sorted(versions) and set(versions) == {0, 7}
        check(found[late, index], prompt, params, 5, version=7)
        check_mixed(found[0, index], prompt, 5, live)


def check_mixed(output, prompt, seed, live):
    """Every token was drawn from logits over a history of the versions that the policy promises."""
    tokens = prompt + output.token_ids
    before = sum(token.version == 0 for token in output.tokens)
    for place, token in enumerate(output.tokens):
        seen = tokens[: len(prompt) + place]
        if token.version == 0:
            versions = [0] * len(seen)
        elif live == RECOMPUTE:
            versions = [7] * len(seen)
        else:  # the token that was drawn last had not been seen yet
            versions = [0] * (len(prompt) + before - 1) + [7] * (place - before + 1)
        logits = torch.from_numpy(logits_of(list(zip(seen, versions, strict=True))))[None]
        (drawn,) = sample(logits, [0], [Draw(seed, output.index, place)])
        assert drawn.token == token.id


def test_samples_share_the_prompt_and_its_owner():
    executor = FakeExecutor(2, "DOP", dict.fromkeys(PAGES, 100))
    engine = Engine(executor, replace(CONFIG, rebalance_every=0))
    prompt = prompt_of(3, 90)
    engine.add(prompt, SamplingParams(n=5, max_tokens=8, seed=1))
    engine.add(prompt_of(4, 10), SamplingParams(max_tokens=8, seed=1))
    drain(engine)
    assert sum(plan.rows for plan in executor.plans) == 90 + 5 * 7 + 10 + 7
    assert sum(len(plan.forks) for plan in executor.plans) == 4
    owners = {chunk.request: chunk.owner for plan in executor.plans for chunk in plan.chunks}
    forks = {fork.request: fork.source for plan in executor.plans for fork in plan.forks}
    assert len({owners[each] for each in (*forks, *forks.values())}) == 1
    assert set(owners.values()) == {0, 1}


def test_requests_with_equal_beginnings_share_whole_pages():
    executor = FakeExecutor(1, "TP", dict.fromkeys(PAGES, 100))
    engine = Engine(executor, replace(CONFIG, keep_prefixes=True, max_rows=200))
    common = prompt_of(5, 140)
    params = SamplingParams(max_tokens=3, seed=2)
    first = engine.add([*common, 1, 2], params)
    found = outputs(drain(engine))
    second = engine.add([*common, 7], params)
    found |= outputs(drain(engine))
    assert [fork.tokens for plan in executor.plans for fork in plan.forks] == [128]
    check(found[first, 0], [*common, 1, 2], params, 2)
    check(found[second, 0], [*common, 7], params, 2)


def test_an_owner_that_fills_up_preempts_its_youngest():
    executor = FakeExecutor(2, "DP", {**PAGES, "DP": 4})
    engine = Engine(executor, replace(CONFIG, expected_growth=0.0, layouts=("DP",), rebalance_every=0))
    params = SamplingParams(max_tokens=150, seed=1, ignore_eos=True)
    prompts = [prompt_of(i, 60) for i in range(5)]
    for prompt in prompts:
        engine.add(prompt, params)
    found = outputs(drain(engine))
    assert engine.metrics.preempted > 0
    assert found[0, 0].preemptions == found[1, 0].preemptions == 0  # the oldest of each owner
    for number, prompt in enumerate(prompts):
        check(found[number, 0], prompt, params, 1)


def test_nobody_is_preempted_when_all_growth_is_reckoned_with():
    executor = FakeExecutor(2, "DP", {**PAGES, "DP": 8})
    engine = Engine(executor, replace(CONFIG, expected_growth=1.0, layouts=("DP",)))
    for i in range(9):
        engine.add(prompt_of(i, 60), SamplingParams(max_tokens=150, seed=i))
    drain(engine)
    assert engine.metrics.preempted == 0


def test_a_request_that_fits_one_layout_only_brings_it_about():
    """300 tokens are 5 pages; TP has room for 4 on each rank, CP for 4 on each of two ranks, so for 8 together."""
    executor = FakeExecutor(2, "TP", {"TP": 4, "DP": 4, "CP": 4, "DOP": 4})
    engine = Engine(executor, CONFIG)
    params = SamplingParams(max_tokens=60, seed=3)
    prompt = prompt_of(9, 240)
    engine.add(prompt, params)
    found = outputs(drain(engine))
    check(found[0, 0], prompt, params, 3)
    assert executor.layout.name == "CP"


def test_a_request_that_never_fits_is_refused_with_the_arithmetic():
    executor = FakeExecutor(2, "DP", {**PAGES, "DP": 2})
    engine = Engine(executor, replace(CONFIG, layouts=("DP",)))
    engine.add(prompt_of(1, 120), SamplingParams(max_tokens=9))
    with pytest.raises(RequestError, match=r"cache up to 129 tokens, 3 pages of 64.*DP, has 2.* at most 9 tokens"):
        engine.add(prompt_of(1, 120), SamplingParams(max_tokens=10))
    with pytest.raises(RequestError, match=r"are 100120; the context is 384.*at most 264"):
        engine.add(prompt_of(1, 120), SamplingParams(max_tokens=100_000))


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], {}, "empty"),
        ([VOCABULARY], {}, r"the prompt has 40; token ids are integers from 0 to 39"),
        ([True], {}, "the prompt has True"),
        ([1], {"stop_token_ids": (-1,)}, "stop_token_ids has -1"),
        ([1], {"stop": ("a",)}, "need a tokenizer"),
        ([1], {"max_tokens": 0}, "max_tokens is 0"),
        ([1], {"temperature": float("nan")}, "temperature is nan"),
        ([1], {"temperature": -1}, "temperature is -1"),
        ([1], {"top_p": 0.0}, "top_p is 0"),
        ([1], {"top_p": 1.1}, "top_p is 1.1"),
        ([1], {"top_k": -1}, "top_k is -1"),
        ([1], {"n": 0}, "n is 0"),
        ([1], {"n": True}, "n is True"),
        ([1], {"seed": 2**63}, "seed is"),
        ([1], {"min_tokens": 20}, "min_tokens is 20, more than max_tokens, 16"),
        ([1], {"stop": ("",)}, "stop has an empty string"),
        ([1], {"logprobs": 21}, "logprobs is 21"),
    ],
)
def test_bad_requests_are_refused_by_name(prompt, params, message):
    engine = Engine(FakeExecutor(), CONFIG)
    with pytest.raises(RequestError, match=message):
        engine.add(prompt, SamplingParams(**params))
    assert not engine.has_work


def test_overload_is_refused_and_passes():
    engine = Engine(FakeExecutor(), replace(CONFIG, max_waiting=2))
    for _ in range(2):
        engine.add([1], SamplingParams(max_tokens=2))
    with pytest.raises(Overloaded, match="2 requests wait already"):
        engine.add([1], SamplingParams(max_tokens=2))
    collected = gather(engine.step(), {})
    engine.add([1], SamplingParams(max_tokens=2))
    assert len(outputs(drain(engine, collected))) == 3
    assert engine.metrics.refused == 1


def test_a_bad_row_fails_its_request_alone():
    engine = Engine(FakeExecutor(), CONFIG)
    params = SamplingParams(max_tokens=6, seed=2, n=2)
    good, bad = prompt_of(1, 20), [*prompt_of(2, 20), POISON]
    engine.add(good, params)
    engine.add(bad, params)
    found = outputs(drain(engine))
    for index in range(2):
        check(found[0, index], good, params, 2)
        assert found[1, index].finish_reason == "error"
        assert "no distribution" in found[1, index].message


def test_pages_of_an_aborted_request_are_free_at_once():
    executor = FakeExecutor()
    engine = Engine(executor, replace(CONFIG, keep_prefixes=True))
    engine.add(prompt_of(1, 80), SamplingParams(max_tokens=50, n=3))
    for _ in range(4):
        engine.step()
    partial = engine.abort(0)
    assert [each.finish_reason for each in partial.samples] == ["abort"] * 3
    assert all(each.tokens for each in partial.samples)
    assert engine.abort(0) is None
    engine.step()
    assert not executor.cache and not engine.has_work


def test_paused_engine_rests_and_goes_on():
    executor = FakeExecutor()
    engine = Engine(executor, CONFIG)
    engine.add(prompt_of(1, 10), SamplingParams(max_tokens=6, seed=4))
    collected = gather(engine.step(), {})
    engine.pause()
    engine.add(prompt_of(2, 10), SamplingParams(max_tokens=6, seed=4))
    assert engine.step() == [] and not engine.has_work and len(executor.plans) == 1
    engine.resume()
    assert len(outputs(drain(engine, collected))) == 2


def test_a_failed_step_ends_the_engine_with_its_reason():
    executor = FakeExecutor()
    executor.fails_at = 2
    engine = Engine(executor, CONFIG)
    engine.add(prompt_of(1, 10), SamplingParams(max_tokens=6))
    with pytest.raises(EngineFailed, match="on fire"):
        drain(engine)
    with pytest.raises(EngineFailed, match="on fire"):
        engine.add([1], SamplingParams())


def test_seeds_of_requests_without_one_differ_and_come_back():
    runs = []
    for _ in range(2):
        engine = Engine(FakeExecutor(), CONFIG)
        for _ in range(2):
            engine.add([1, 2], SamplingParams(max_tokens=8))
        done = [deltas[-1].completed for deltas in drain(engine).values()]
        runs.append([(each.seed, each.samples[0].token_ids) for each in done])
        check(done[0].samples[0], [1, 2], SamplingParams(max_tokens=8), done[0].seed)
    assert runs[0] == runs[1]
    assert runs[0][0] != runs[0][1]
