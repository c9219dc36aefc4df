"""The attention kernels on a GPU, against fp64: lengths from 0 to 40,000 in one batch, NaN wherever no token lies."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from paged_case import GQA, MLA_16, MLA_128, check, ends_of, fill, plain

from megaring.rollout.arena import Arena
from megaring.rollout.attention.paged import attend, merge
from megaring.rollout.attention.paged_gpu import append, attend_chunks, decode
from megaring.rollout.attention.segments import Segment, Segments
from megaring.rollout.layout import PAGE
from megaring.rollout.pages import EntryShape, Pages

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 9
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")]
# bf16 keeps a weight to 2^-9; fp32 sums 40,000 terms.
ERROR = {torch.bfloat16: 1e-2, torch.float32: 2e-5}
LSE_ERROR = 2e-5
LENGTHS = [0, 1, 63, 64, 65, 0, 1000, 40_000, 7, 12_345, 0, 333, 2048, 129, 5000, 0]
CASES = {"gqa": GQA, "gqa-2-groups": replace(GQA, groups=2), "mla-16": MLA_16, "mla-128": MLA_128}


def scale_of(case):
    return case.width**-0.5


def run_decode(case, made, queries, lengths, **options):
    return decode(
        queries,
        made.cache,
        made.table,
        torch.tensor(lengths, dtype=torch.int32, device="cuda"),
        ends_of(lengths, "cuda"),
        scale=scale_of(case),
        value_width=case.value_width,
        **options,
    )


def expected_decode(case, made, queries):
    found = [plain(case, queries[i : i + 1], each, None, scale_of(case)) for i, each in enumerate(made.tokens)]
    return tuple(torch.cat(parts) for parts in zip(*found, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("seed", [0, 1])
def test_decode_of_very_different_lengths(name, dtype, seed):
    case, lengths = CASES[name], np.random.default_rng(seed).permutation(LENGTHS).tolist()
    made = fill(case, lengths, dtype, "cuda", seed)
    queries = torch.randn(len(lengths), case.heads, case.width, device="cuda").to(dtype)
    expected = expected_decode(case, made, queries)
    for ranges in (None, 1, 7) if seed == 0 else (None,):
        check(run_decode(case, made, queries, lengths, ranges=ranges), expected, ERROR[dtype], LSE_ERROR)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("lengths", [[40_000], [0], [0] * 5, [1] * 300, [64] * 257], ids=lambda each: f"{len(each)}")
def test_decode_of_batches_at_the_edges(name, lengths):
    case = CASES[name]
    made = fill(case, lengths, torch.bfloat16, "cuda")
    queries = torch.randn(len(lengths), case.heads, case.width, device="cuda").bfloat16()
    check(run_decode(case, made, queries, lengths), expected_decode(case, made, queries), 1e-2, LSE_ERROR)


def test_large_scores_do_not_overflow():
    made = fill(GQA, [3000, 10], torch.bfloat16, "cuda")
    queries = 60 * torch.randn(2, 32, 128, device="cuda").bfloat16()
    check(run_decode(GQA, made, queries, [3000, 10]), expected_decode(GQA, made, queries), 1e-2, 1e-5)


@pytest.mark.parametrize("name", ["gqa", "mla-16"])
def test_a_captured_decode_reads_lengths_tables_and_queries_when_it_is_replayed(name):
    case, longest = CASES[name], [640, 640, 640, 640]
    made = fill(case, longest, torch.bfloat16, "cuda")
    queries = torch.zeros(4, case.heads, case.width, device="cuda", dtype=torch.bfloat16)
    lengths, ends = torch.zeros(4, dtype=torch.int32, device="cuda"), torch.zeros(4, dtype=torch.int32, device="cuda")
    arguments = {"scale": scale_of(case), "value_width": case.value_width}
    decode(queries, made.cache, made.table, lengths, ends, **arguments)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = decode(queries, made.cache, made.table, lengths, ends, **arguments)
    for now in ([640, 1, 0, 130], [0, 0, 0, 0], [64, 65, 639, 1]):
        queries.copy_(torch.randn(queries.shape, device="cuda"))
        lengths.copy_(torch.tensor(now))
        ends.copy_(ends_of(now, "cpu"))
        graph.replay()
        cut = replace(made, tokens=[each[:, :, :length] for each, length in zip(made.tokens, now, strict=True)])
        check(found, expected_decode(case, cut, queries), 1e-2, LSE_ERROR)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("shards", [1, 2])
def test_chunks_are_causal_by_position(name, dtype, shards):
    """New tokens at the ends of histories, over all pages or over those of one of two ranks."""
    case, rows = CASES[name], [(500, 500), (2, 3000), (65, 130), (129, 20_000)]
    for shard in range(shards):
        here = [torch.arange(total, device="cuda") for _, total in rows]
        here = [each[each // PAGE % shards == shard] for each in here]
        made = fill(case, [len(each) for each in here], dtype, "cuda")
        queries = torch.randn(sum(count for count, _ in rows), case.heads, case.width, device="cuda").to(dtype)
        first, facts, wanted = 0, [], []
        for (count, total), mine, tokens in zip(rows, here, made.tokens, strict=True):
            facts.append((first, count, total - count, len(mine)))
            for part in range(first, first + count, 64):  # fp64 scores of all at once are large
                stop = min(part + 64, first + count)
                positions = torch.arange(total - count + part - first, total - count + stop - first, device="cuda")
                visible = mine[None] <= positions[:, None]
                wanted.append(plain(case, queries[part:stop], tokens, visible, scale_of(case)))
            first += count
        out = torch.full((first, case.heads, case.value_width), float("nan"), device="cuda")
        lse = torch.full((first, case.heads), float("nan"), device="cuda")
        attend_chunks(
            out,
            lse,
            queries,
            made.cache,
            made.table,
            torch.tensor(facts, dtype=torch.int32, device="cuda"),
            tuple(count for count, _ in rows),
            scale=scale_of(case),
            shard=shard,
            shards=shards,
        )
        expected = tuple(torch.cat(parts) for parts in zip(*wanted, strict=True))
        check((out, lse), expected, ERROR[dtype], LSE_ERROR)


def test_tokens_are_appended_where_they_belong():
    cache = torch.zeros(6, 2, 2, PAGE, 128, device="cuda", dtype=torch.bfloat16)
    entries = torch.randn(5, 2, 4, 128, device="cuda").bfloat16()
    sources = torch.tensor([4, 0, 2], device="cuda")
    offsets = torch.tensor([63, -1, 0], dtype=torch.int32, device="cuda")
    units = torch.tensor([[5, 0], [1, 2], [3, 4]], dtype=torch.int32, device="cuda")
    append(cache, entries.transpose(1, 2).contiguous().transpose(1, 2), sources, units, offsets)
    expected = torch.zeros_like(cache)
    for source, offset, pair in ((4, 63, (5, 0)), (2, 0, (3, 4))):
        for group, unit in enumerate(pair):
            expected[unit, :, :, offset] = entries[source, :, 2 * group : 2 * group + 2]
    assert torch.equal(cache, expected)


@pytest.mark.parametrize("planes", [1, 2])
def test_attend_in_pages_that_move_equals_the_cpu(planes):
    """Single tokens beside a chunk, requests without pages here, tables that change; and parts merged by LSE."""
    entry = EntryShape(planes, 4, 32, 2, 32 if planes == 2 else 24)
    lengths, rows = (1, 65, 700, 130), (1, 1, 6, 1)
    queries = torch.randn(sum(rows), 8, 32)
    made = {}
    for device in ("cpu", "cuda"):
        arena = Arena(256, entry.unit_bytes(torch.float32), torch.device(device))
        pages = Pages(arena, entry, 2, torch.float32)
        arena.bytes.view(torch.float32).fill_(float("nan"))
        made[device] = pages
    slots, first = [], 0
    for length in lengths:
        slots.append(np.arange(first, first := first + -(-length // PAGE)))
        tokens, at = torch.randn(length, planes, 4, 32), np.arange(length)
        for device, pages in made.items():
            pages.reserve_slots(first)
            pages.device_table()  # so that every later change has to reach it
            pages.allocate(1, slots[-1], range(2))
            pages.append(1, slots[-1][at // PAGE], at % PAGE, range(2), tokens.to(device))
    for pages in made.values():
        pages.evacuate(np.array([0, 3, 9, 20]))

    def run(device, shard, shards):
        segments, row = [], 0
        for count, length, mine in zip(rows, lengths, slots, strict=True):
            indices = np.arange(shard, len(mine), shards)
            segments.append(Segment(slice(row, row + count), length - count, mine[indices], indices, length))
            row += count
        held = Segments(segments, device, shard=shard, shards=shards)
        found = attend(queries.to(device), made[device], 1, range(2), held, scale=0.2)
        return tuple(each.cpu() for each in found)

    for shard, shards in ((0, 1), (0, 2), (1, 2)):
        for found, expected in zip(run("cuda", shard, shards), run("cpu", shard, shards), strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    parts = [run("cuda", shard, 2) for shard in range(2)]
    merged = merge(*(torch.stack(each) for each in zip(*parts, strict=True)))
    torch.testing.assert_close(merged, run("cpu", 0, 1)[0], rtol=0, atol=1e-5)
