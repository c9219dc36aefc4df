"""Run by a test with TRITON_INTERPRET=1: the kernels on the CPU, on tiny shapes, against fp64."""

from __future__ import annotations

from dataclasses import replace

import torch
from paged_case import Case, check, ends_of, fill, plain
from triton.runtime import interpreter

from megaring.rollout.attention.paged_gpu import Tiling, append, attend_chunks, decode

GQA = Case(heads=8, kv_heads=2, width=16, value_width=16, planes=2, groups=2)
MLA = Case(heads=5, kv_heads=1, width=24, value_width=20, planes=1)  # no width is a power of two
SCALE, TILING = 0.3, Tiling(64, 2, 4, 16)
CHUNKS = replace(TILING, heads=4)


def bounds_of_loops_for_numpy_2_5() -> None:
    """Triton 3.6 turns its scalars, arrays of one element, into integers by ``int``, which NumPy no longer does."""
    patch = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patched


def decode_cases() -> None:
    lengths = [70, 0, 1, 64, 0, 200, 0]
    for case, counts in ((GQA, (1, 3)), (replace(GQA, groups=1), (4,)), (MLA, (30,))):
        made = fill(case, lengths, torch.float32, "cpu")
        queries = torch.randn(len(lengths), case.heads, case.width)
        wanted = [plain(case, queries[i : i + 1], each, None, SCALE) for i, each in enumerate(made.tokens)]
        expected = tuple(torch.cat(parts) for parts in zip(*wanted, strict=True))
        for ranges in counts:  # all rows in one, some in each, and more than there are pages
            found = decode(
                queries,
                made.cache,
                made.table,
                torch.tensor(lengths, dtype=torch.int32),
                ends_of(lengths, "cpu"),
                scale=SCALE,
                value_width=case.value_width,
                tiling=TILING,
                ranges=ranges,
            )
            check(found, expected, 2e-6)
    nothing = fill(GQA, [0, 0], torch.float32, "cpu")
    out, lse = decode(
        torch.randn(2, 8, 16),
        nothing.cache,
        nothing.table,
        torch.zeros(2, dtype=torch.int32),
        ends_of([0, 0], "cpu"),
        scale=SCALE,
        value_width=16,
    )
    assert (out == 0).all()
    assert (lse == float("-inf")).all()


def chunk_cases() -> None:
    """Chunks at the ends of histories, whole and split by position over two ranks, of which one may see nothing."""
    rows = [(40, 40), (3, 130), (9, 67)]  # new tokens, all tokens
    for case, splits in ((GQA, ((0, 1), (1, 2))), (MLA, ((0, 2),))):
        for shard, shards in splits:
            positions = [torch.arange(total) for _, total in rows]
            here = [each[each // 64 % shards == shard] for each in positions]
            made = fill(case, [len(each) for each in here], torch.float32, "cpu")
            queries = torch.randn(sum(count for count, _ in rows), case.heads, case.width)
            first, facts, wanted = 0, [], []
            for (count, total), mine, tokens in zip(rows, here, made.tokens, strict=True):
                facts.append((first, count, total - count, len(mine)))
                visible = mine[None] <= torch.arange(total - count, total)[:, None]
                wanted.append(plain(case, queries[first : first + count], tokens, visible, SCALE))
                first += count
            out = torch.full((first, case.heads, case.value_width), float("nan"))
            lse = torch.full((first, case.heads), float("nan"))
            attend_chunks(
                out,
                lse,
                queries,
                made.cache,
                made.table,
                torch.tensor(facts, dtype=torch.int32),
                tuple(count for count, _ in rows),
                scale=SCALE,
                shard=shard,
                shards=shards,
                tiling=CHUNKS,
            )
            check((out, lse), tuple(torch.cat(parts) for parts in zip(*wanted, strict=True)), 2e-6)


def append_case() -> None:
    cache = torch.zeros(6, 2, 2, 64, 12)
    entries = torch.randn(5, 2, 4, 12)
    sources, offsets = torch.tensor([4, 0, 2]), torch.tensor([63, -1, 0], dtype=torch.int32)
    units = torch.tensor([[5, 0], [1, 2], [3, 4]], dtype=torch.int32)
    append(cache, entries, sources, units, offsets)
    expected = torch.zeros_like(cache)
    for source, offset, pair in ((4, 63, (5, 0)), (2, 0, (3, 4))):
        for group, unit in enumerate(pair):
            expected[unit, :, :, offset] = entries[source, :, 2 * group : 2 * group + 2]
    assert (cache == expected).all()


if __name__ == "__main__":
    bounds_of_loops_for_numpy_2_5()
    torch.manual_seed(0)
    decode_cases()
    chunk_cases()
    append_case()
    print("all equal")
