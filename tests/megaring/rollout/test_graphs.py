"""The GPU's way through a worker, on the CPU: block tables and lengths on the device, stacked experts, decode steps
from fixed buffers. Plain functions stand in for the three kernels, and a function that is called again for a CUDA
graph: what it reads must be in its buffers. Everything equals the worker that does without.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from mla_case import V2_LITE, V3, make_mla_model
from paged_case import Case, plain
from rollout_case import DENSE, MODEL, VOCABULARY, make_model

from megaring.megatron import parallel
from megaring.rollout import runner as runner_module
from megaring.rollout.attention import paged, paged_gpu
from megaring.rollout.decoder import Decoder
from megaring.rollout.graphs import BUCKETS, DecodeGraphs
from megaring.rollout.layout import LAYOUTS, PAGE
from megaring.rollout.ranks import Ranks
from megaring.rollout.runner import Runner
from megaring.rollout.step import Chunk, Fork, StepPlan

PROMPT = tuple(np.random.default_rng(5).integers(0, VOCABULARY, 400).tolist())
MODELS = {"gqa": MODEL, "dense": DENSE, "v2-lite": V2_LITE, "v3": V3}


def gather(cache, units, length):
    """Tokens ``[planes, cache heads, length, width]`` of a row with ``units [pages, groups]``."""
    held = cache[units[: -(-length // PAGE)].long()]  # [pages, groups, planes, group heads, 64, width]
    return held.permute(2, 1, 3, 0, 4, 5).flatten(3, 4).flatten(1, 2)[:, :, :length]


def case_of(queries, cache, table, value_width):
    return Case(queries.shape[1], table.shape[2] * cache.shape[2], queries.shape[2], value_width, cache.shape[1])


def decode(queries, cache, table, lengths, ends, *, scale, value_width):
    case = case_of(queries, cache, table, value_width)
    assert ends.tolist() == np.cumsum(-(-lengths.numpy() // PAGE)).tolist()
    rows = [
        plain(case, query[None], gather(cache, units, length), None, scale)
        for query, units, length in zip(queries, table, lengths.tolist(), strict=True)
    ]
    return tuple(torch.cat(parts).float() for parts in zip(*rows, strict=True))


def attend_chunks(out, lse, queries, cache, table, segments, counts, *, scale, shard, shards):
    case = case_of(queries, cache, table, out.shape[2])
    for (first, count, start, tokens), units in zip(segments.tolist(), table, strict=True):
        places = torch.arange(tokens)
        positions = (shard + places // PAGE * shards) * PAGE + places % PAGE
        visible = positions[None] <= torch.arange(start, start + count)[:, None]
        rows = slice(first, first + count)
        out[rows], lse[rows] = plain(case, queries[rows], gather(cache, units, tokens), visible, scale)


def append(cache, entries, sources, units, offsets):
    for source, unit, offset in zip(sources.tolist(), units.tolist(), offsets.tolist(), strict=True):
        if offset >= 0:
            cache[unit, :, :, offset] = entries[source].unflatten(1, (len(unit), -1)).transpose(0, 1)


def chunk(request, start, count, **changes):
    return Chunk(request, 0, start, PROMPT[start + request : start + request + count], **changes)


def plans():
    """Prompts beside single tokens, a fork, decode that crosses pages, releases, layouts in turn, and a mixed end."""
    yield (chunk(1, 0, 62), chunk(2, 0, 3)), {"experts": True}
    yield (chunk(1, 62, 1), chunk(2, 3, 90), chunk(3, 0, 1)), {}
    yield (chunk(4, 40, 1), chunk(1, 63, 1), chunk(3, 1, 1, logits="none")), {"forks": (Fork(4, 1, 40),)}
    for step in range(3):
        yield (chunk(3, 2 + step, 1), chunk(1, 64 + step, 1), chunk(4, 41 + step, 1)), {}
    for step, layout in enumerate(("DOP", "CP", "DP")):
        yield (chunk(1, 67 + 2 * step, 1), chunk(4, 44 + 2 * step, 1)), {"switch_to": layout}
        yield (chunk(4, 45 + 2 * step, 1), chunk(1, 68 + 2 * step, 1)), {"release": (2,) if not step else ()}
    yield (chunk(1, 73, 5, logits="all"), chunk(4, 50, 1), chunk(5, 0, 1)), {"experts": True, "release": (3,)}


def run(runner):
    return [
        runner.step(StepPlan(number, runner.layout.name, chunks, **changes))
        for number, (chunks, changes) in enumerate(plans())
    ]


def make(kind, *, dtype=torch.float32):
    model = make_mla_model(1, kind, dtype) if isinstance(kind, dict) else make_model(1, kind, 3, dtype)
    return Runner(model, Ranks.single(), memory=1 << 21, layout=LAYOUTS["TP"], vocab_size=VOCABULARY)


def gpu_way(runner, patch, capture):
    """Send a worker the way of a GPU; returns its graphs."""
    patch.setattr(paged, "by_kernels", lambda rows: True)
    for name, stand_in in (("decode", decode), ("attend_chunks", attend_chunks), ("append", append)):
        patch.setattr(paged_gpu, name, stand_in)
    runner._graphs = DecodeGraphs(
        runner.pages,
        runner._kinds[0].rotation,
        runner.decoder.dtype,
        lambda batch, rotary, layout: runner.decoder.logits(runner._through(batch, rotary, layout)),
        capture,
    )
    return runner._graphs


def again(function):
    out = function()
    return lambda: out.copy_(function()), out


def both_ways(rank, world_size, kind):
    """Results of both, and how the second one got them."""
    wanted = run(make(kind))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner_module, "Decoder", lambda *arguments: Decoder(*arguments, stacked=True))
        runner = make(kind)
        graphs = gpu_way(runner, patch, again)
        found = run(runner)
    parallel.stop()
    return wanted, found, graphs.captured


@pytest.mark.parametrize("name", MODELS)
def test_the_way_of_a_gpu_gives_what_the_other_one_gives(pool, name):
    ((wanted, found, captured),) = pool.run(1, both_ways, MODELS[name])
    for one, other in zip(found, wanted, strict=True):
        assert (one.layout, one.switched) == (other.layout, other.switched)
        assert one.logits.shape == other.logits.shape
        torch.testing.assert_close(one.logits, other.logits, rtol=0, atol=2e-5 * float(other.logits.abs().max()))
        assert (one.experts is None) == (other.experts is None)
        assert one.experts is None or torch.equal(one.experts, other.experts)
    eager = ["expert choices", "prefill", "switch", "switch", "switch", "expert choices"]
    assert [each.eager for each in found if not each.replayed] == eager
    assert captured == 4  # three rows in one layout, two in the others
    assert all(each.eager is None and not each.replayed for each in wanted)


def failing(rank, world_size):
    def capture(function):
        function()
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    wanted = run(make(MODEL))
    with pytest.MonkeyPatch.context() as patch:
        runner = make(MODEL)
        gpu_way(runner, patch, capture)
        found = run(runner)
    parallel.stop()
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.logits, other.logits, rtol=0, atol=1e-5)
    return [each.eager for each in found]


def test_a_capture_that_fails_is_said_in_every_step(pool):
    (eager,) = pool.run(1, failing)
    reason = "capture failed: operation not permitted when stream is capturing"
    assert eager == ["expert choices", "prefill", *[reason] * (len(eager) - 2)]


def asleep(rank, world_size):
    """Sleep drops what points into the arena; what was released is not seen by those that come later."""
    with pytest.MonkeyPatch.context() as patch:
        runner = make(MODEL)
        graphs = gpu_way(runner, patch, again)
        first = [runner.step(StepPlan(step, "TP", (chunk(1, step, 1),))) for step in range(3)]
        runner.step(StepPlan(3, "TP", release=(1,)))
        runner.sleep()
        runner.wake(0)
        runner.arena.bytes[: runner.arena.unit_bytes * 4] = 255  # NaN where pages are
        second = [runner.step(StepPlan(step, "TP", (chunk(1, step, 1),))) for step in range(3)]
    parallel.stop()
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one.logits, other.logits)
        assert one.replayed
        assert other.replayed
    return graphs.captured


def test_sleep_drops_graphs(pool):
    assert pool.run(1, asleep) == [2]


def wanted_on_a_cpu(rank, world_size):
    model = make_model(1, MODEL, 3, torch.float32)
    with pytest.raises(ValueError, match=r"one rank with a GPU in bf16; this is 1 ranks on cpu in float32"):
        Runner(model, Ranks.single(), memory=1 << 21, layout=LAYOUTS["TP"], graphs=True)
    parallel.stop()


def test_graphs_are_refused_where_they_cannot_be(pool):
    pool.run(1, wanted_on_a_cpu)


def stacked(rank, world_size):
    model = make_model(1, replace(MODEL, num_layers=1), 3, torch.float32)
    decoder = Decoder(model, Ranks.single(), stacked=True)
    expert = model.decoder.layers[0].mlp.experts.local_experts[2].linear_fc2
    rows = torch.randn(7, 32)
    before = decoder.feed_forward(decoder.layers[0], rows)[0]
    with torch.no_grad():
        expert.weight.mul_(2.0)  # in place, as a refit does
    changed = (decoder.feed_forward(decoder.layers[0], rows)[0] - before).abs().amax(dim=1) > 0
    visited = decoder.feed_forward(decoder.layers[0], rows)[1][:, 2]
    decoder.check_adopted()
    expert.weight.data = expert.weight.data.clone()
    with pytest.raises(RuntimeError, match="linear_fc2 of expert 2 was replaced"):
        decoder.check_adopted()
    parallel.stop()
    return changed.tolist(), visited.tolist()


def test_stacked_experts_follow_their_parameters(pool):
    ((changed, visited),) = pool.run(1, stacked)
    assert changed == visited
    assert any(visited)
    assert not all(visited)


def test_buckets_waste_little():
    assert list(BUCKETS) == sorted(set(BUCKETS))
    assert BUCKETS[-1] == 256
    assert all(after - before <= max(8, before // 4) for before, after in itertools.pairwise(BUCKETS))


def refitted(rank, world_size):
    """Weights written in place are used by the graph that there is; one that was replaced has it captured again."""
    with pytest.MonkeyPatch.context() as patch:
        runner = make(MODEL)
        graphs = gpu_way(runner, patch, again)
        norm, captured, found = runner.decoder.model.decoder.final_layernorm.weight, [], []
        for version, change in enumerate((lambda: None, lambda: norm.data.mul_(2.0), lambda: norm.data.clone() * 2.0)):
            with torch.no_grad():
                changed = change()
            if version == 2:
                norm.data = changed
            runner.refit(version)
            for step in range(2):
                plan = StepPlan(step, "TP", (chunk(1, step, 1),), weight_version=version)
                found.append(runner.step(plan).logits)
            runner.step(StepPlan(2, "TP", release=(1,), weight_version=version))
            captured.append(graphs.captured)
    parallel.stop()
    return captured, found


def test_graphs_follow_a_refit(pool):
    ((captured, found),) = pool.run(1, refitted)
    assert captured == [1, 1, 2]
    for step in range(2):
        for times in (1, 2):  # the last norm scales the logits
            torch.testing.assert_close(found[2 * times + step], found[step] * 2**times, rtol=1e-5, atol=1e-6)
