"""Triton kernels of attention over paged KV: decode split over the pages of all rows, its combine, and chunks.

A unit of the cache is ``[planes, group heads, 64, width]``. A key is a row of its first plane: ``MAIN`` elements, which
are also those of the result, and ``REST`` more (the rotary key of MLA; none for GQA). Values are the second plane, or,
where there is one plane, the main part of the keys. Everything is added up in fp32; scores are in base 2.
"""

from __future__ import annotations

import inspect

import triton
import triton.language as tl

# Sizes of a batch, and arrays of small integers: Triton would otherwise compile a kernel anew where one of them happens
# to be 1 or to divide by 16.
_SIZES = ("rows", "pages", "ranges", "shard", "shards")
_LISTS = ("table", "lengths", "ends", "blocks", "segments", "sources", "units", "offsets")


def _jit(function):
    """``triton.jit``, compiled once for all batches."""
    names = inspect.signature(function).parameters
    return triton.jit(
        function,
        do_not_specialize=[each for each in _SIZES if each in names],
        do_not_specialize_on_alignment=[each for each in _LISTS if each in names],
    )


@triton.jit
def _load_query(queries, row, heads, held, ROW, WIDTH, FIRST, COUNT, BLOCK: tl.constexpr):
    """``[M, BLOCK]`` elements FIRST to FIRST + COUNT of some heads of a row (or of rows: ``row`` may be ``[M]``)."""
    column = tl.arange(0, BLOCK)
    place = queries + (row * ROW + heads * WIDTH)[:, None] + FIRST + column[None, :]
    return tl.load(place, mask=held[:, None] & (column < COUNT)[None, :], other=0.0)


@triton.jit
def _accumulate(
    acc,
    top,
    total,
    main,
    rest,
    cache,
    units,
    first_page,
    last_page,
    tokens,
    positions,
    shard,
    shards,
    scale,
    GROUPS: tl.constexpr,
    UNIT: tl.constexpr,
    PLANE: tl.constexpr,
    MAIN: tl.constexpr,
    REST: tl.constexpr,
    BLOCK_MAIN: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    CAUSAL: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Online softmax over the held pages ``[first_page, last_page)`` of one history (Flash-Decoding's inner loop).

    ``cache`` points at the cache head within a unit, ``units`` at the history's block table; ``PLANE`` is the distance
    of values from keys, 0 where they are the same. Held page p is page ``shard + p * shards`` of the request.
    """
    column = tl.arange(0, BLOCK_MAIN)
    beside = MAIN + tl.arange(0, BLOCK_REST)
    for tile in tl.range(first_page * (PAGE // TILE), last_page * (PAGE // TILE), num_stages=STAGES):
        page = tile // (PAGE // TILE)
        offset = (tile % (PAGE // TILE)) * TILE + tl.arange(0, TILE)
        unit = tl.load(units + page * GROUPS).to(tl.int64)
        place = cache + unit * UNIT + (offset * (MAIN + REST))[:, None]
        # What a page holds beyond its tokens may be anything, and 0 x NaN is NaN.
        here = page * PAGE + offset < tokens
        held = here[:, None]
        if MAIN != BLOCK_MAIN:
            held = held & (column < MAIN)[None, :]
        key = tl.load(place + column[None, :], mask=held, other=0.0)
        scores = tl.dot(main, tl.trans(key), input_precision=PRECISION)
        if REST > 0:
            also = here[:, None]
            if REST != BLOCK_REST:
                also = also & (beside < MAIN + REST)[None, :]
            key_rest = tl.load(place + beside[None, :], mask=also, other=0.0)
            scores = tl.dot(rest, tl.trans(key_rest), acc=scores, input_precision=PRECISION)
        visible = here[None, :]
        if CAUSAL:
            key_positions = (shard + page * shards) * PAGE + offset
            visible = visible & (key_positions[None, :] <= positions[:, None])
        scores = tl.where(visible, scores * scale, float("-inf"))
        peak = tl.maximum(top, tl.max(scores, axis=1))
        safe = tl.where(peak == float("-inf"), 0.0, peak)
        weights = tl.exp2(scores - safe[:, None])
        decay = tl.exp2(top - safe)
        total = total * decay + tl.sum(weights, axis=1)
        if PLANE > 0:  # noqa: SIM108 (the kernel language compiles one branch of this, not of a conditional expression)
            value = tl.load(place + PLANE + column[None, :], mask=held, other=0.0)
        else:
            value = key
        acc = tl.dot(weights.to(value.dtype), value, acc=acc * decay[:, None], input_precision=PRECISION)
        top = peak
    return acc, top, total


@_jit
def decode_kernel(
    partial,
    partial_lse,
    queries,
    cache,
    table,
    lengths,
    ends,
    rows,
    pages,
    ranges,
    scale,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP_HEADS: tl.constexpr,
    PLANES: tl.constexpr,
    MAIN: tl.constexpr,
    REST: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_MAIN: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One query a row. The pages of all rows, end to end, are cut into equal ranges, and a program takes one of them
    for ``BLOCK_HEADS`` heads: so it may see the end of one row, some whole ones and the beginning of another.

    What range c makes of row r is partial result r + c, each of which there is at most once. queries
    ``[rows, HEADS, MAIN + REST]``; table int32 ``[rows, pages, KV_HEADS / GROUP_HEADS]`` units; lengths int32
    ``[rows]``; ends int32 ``[rows]``: pages of the rows so far. partial fp32 ``[rows + ranges, HEADS, MAIN]`` with
    LSE in base 2 ``[rows + ranges, HEADS]``.
    """
    share: tl.constexpr = HEADS // KV_HEADS
    blocks: tl.constexpr = (share + BLOCK_HEADS - 1) // BLOCK_HEADS
    groups: tl.constexpr = KV_HEADS // GROUP_HEADS
    width: tl.constexpr = MAIN + REST
    unit: tl.constexpr = PLANES * GROUP_HEADS * PAGE * width
    plane: tl.constexpr = (PLANES - 1) * GROUP_HEADS * PAGE * width
    kv_head = tl.program_id(0) // blocks
    index = tl.program_id(1)
    all_pages = tl.load(ends + rows - 1)
    active = tl.minimum(ranges, all_pages)
    if index >= active:
        return
    first = (index.to(tl.int64) * all_pages // active).to(tl.int32)
    last = ((index + 1).to(tl.int64) * all_pages // active).to(tl.int32)
    every = tl.arange(0, BLOCK_ROWS)
    known = tl.load(ends + every, mask=every < rows, other=2147483647)
    first_row = tl.sum((known <= first).to(tl.int32), axis=0)
    last_row = tl.sum((known < last).to(tl.int32), axis=0)

    place = (tl.program_id(0) % blocks) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    held = place < share
    heads = kv_head * share + place
    mine = cache + (kv_head % GROUP_HEADS) * PAGE * width
    positions = tl.zeros([BLOCK_HEADS], tl.int32)
    for row in range(first_row, last_row + 1):
        begin = tl.load(ends + row - 1, mask=row > 0, other=0)
        end = tl.load(ends + row)
        tokens = tl.load(lengths + row)
        main = _load_query(queries, row, heads, held, HEADS * width, width, 0, MAIN, BLOCK_MAIN)
        rest = main
        if REST > 0:
            rest = _load_query(queries, row, heads, held, HEADS * width, width, MAIN, REST, BLOCK_REST)
        acc, top, total = _accumulate(
            tl.zeros([BLOCK_HEADS, BLOCK_MAIN], tl.float32),
            tl.full([BLOCK_HEADS], float("-inf"), tl.float32),
            tl.zeros([BLOCK_HEADS], tl.float32),
            main,
            rest,
            mine,
            table + tl.cast(row, tl.int64) * pages * groups + kv_head // GROUP_HEADS,
            tl.maximum(first, begin) - begin,
            tl.minimum(last, end) - begin,
            tokens,
            positions,
            0,
            1,
            scale,
            groups,
            unit,
            plane,
            MAIN,
            REST,
            BLOCK_MAIN,
            BLOCK_REST,
            PAGE,
            TILE,
            False,
            STAGES,
            PRECISION,
        )
        column = tl.arange(0, BLOCK_MAIN)
        target = tl.cast(row + index, tl.int64) * HEADS + heads
        some = held & (end > begin)
        tl.store(
            partial + target[:, None] * MAIN + column[None, :],
            acc / total[:, None],
            mask=some[:, None] & (column < MAIN)[None, :],
        )
        tl.store(partial_lse + target, top + tl.log2(total), mask=some)


@_jit
def combine_kernel(
    out,
    lse,
    partial,
    partial_lse,
    ends,
    rows,
    ranges,
    HEADS: tl.constexpr,
    MAIN: tl.constexpr,
    BLOCK: tl.constexpr,
    PIECES: tl.constexpr,
):
    """Merge what ``decode_kernel`` made of each row: out fp32 ``[rows, HEADS, MAIN]``, natural-log lse fp32
    ``[rows, HEADS]``. A row without pages gets 0 and -inf.
    """
    row, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    begin = tl.load(ends + row - 1, mask=row > 0, other=0)
    end = tl.load(ends + row)
    all_pages = tl.load(ends + rows - 1)
    active = tl.minimum(ranges, all_pages)
    # Range c begins at page c * all // active, so page s is in the last c with c * all < (s + 1) * active.
    known = tl.maximum(all_pages, 1)
    first = row + (((begin + 1).to(tl.int64) * active - 1) // known).to(tl.int32)
    last = row + ((end.to(tl.int64) * active - 1) // known).to(tl.int32) + 1
    last = tl.where(end > begin, last, first)
    column = part * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], tl.float32)
    top = tl.full([], float("-inf"), tl.float32)
    total = tl.full([], 0.0, tl.float32)
    for start in range(first, last, PIECES):
        piece = start + tl.arange(0, PIECES)
        target = piece.to(tl.int64) * HEADS + head
        found = tl.load(partial_lse + target, mask=piece < last, other=float("-inf"))
        values = tl.load(
            partial + target[:, None] * MAIN + column[None, :],
            mask=(piece < last)[:, None] & (column < MAIN)[None, :],
            other=0.0,
        )
        peak = tl.maximum(top, tl.max(found, axis=0))
        weights = tl.exp2(found - peak)
        decay = tl.exp2(top - peak)
        acc = acc * decay + tl.sum(values * weights[:, None], axis=0)
        total = total * decay + tl.sum(weights, axis=0)
        top = peak
    empty = end <= begin
    acc = tl.where(empty, 0.0, acc / tl.where(empty, 1.0, total))
    target = row.to(tl.int64) * HEADS + head
    tl.store(out + target * MAIN + column, acc, mask=column < MAIN)
    found = tl.where(empty, float("-inf"), (top + tl.log2(tl.where(empty, 1.0, total))) * 0.6931471805599453)
    tl.store(lse + target, found, mask=part == 0)


@_jit
def chunk_kernel(
    out,
    lse,
    queries,
    cache,
    table,
    blocks,
    segments,
    pages,
    shard,
    shards,
    scale,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP_HEADS: tl.constexpr,
    PLANES: tl.constexpr,
    MAIN: tl.constexpr,
    REST: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_MAIN: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """``BLOCK_TOKENS`` consecutive new tokens of one request, causal by position, over all its held pages.

    blocks int32 ``[n, 2]``: segment, and the block's first token in it. segments int32 ``[s, 4]``: first row of
    queries, tokens, position of the first, and cached tokens held here. table int32 ``[s, pages, groups]``. out and lse
    as in ``combine_kernel``.
    """
    share: tl.constexpr = HEADS // KV_HEADS
    parts: tl.constexpr = (share + BLOCK_HEADS - 1) // BLOCK_HEADS
    groups: tl.constexpr = KV_HEADS // GROUP_HEADS
    width: tl.constexpr = MAIN + REST
    unit: tl.constexpr = PLANES * GROUP_HEADS * PAGE * width
    plane: tl.constexpr = (PLANES - 1) * GROUP_HEADS * PAGE * width
    kv_head = tl.program_id(0) // parts
    segment = tl.load(blocks + tl.program_id(1) * 2)
    begin = tl.load(blocks + tl.program_id(1) * 2 + 1)
    first_row = tl.load(segments + segment * 4)
    count = tl.load(segments + segment * 4 + 1)
    start = tl.load(segments + segment * 4 + 2)
    tokens = tl.load(segments + segment * 4 + 3)

    lane = tl.arange(0, BLOCK_TOKENS * BLOCK_HEADS)
    token = begin + lane // BLOCK_HEADS
    place = (tl.program_id(0) % parts) * BLOCK_HEADS + lane % BLOCK_HEADS
    held = (token < count) & (place < share)
    heads = kv_head * share + place
    rows = (first_row + token).to(tl.int64)
    main = _load_query(queries, rows, heads, held, HEADS * width, width, 0, MAIN, BLOCK_MAIN)
    rest = main
    if REST > 0:
        rest = _load_query(queries, rows, heads, held, HEADS * width, width, MAIN, REST, BLOCK_REST)
    last_position = start + tl.minimum(begin + BLOCK_TOKENS, count) - 1
    reached = tl.maximum(last_position // PAGE - shard + shards, 0) // shards
    acc, top, total = _accumulate(
        tl.zeros([BLOCK_TOKENS * BLOCK_HEADS, BLOCK_MAIN], tl.float32),
        tl.full([BLOCK_TOKENS * BLOCK_HEADS], float("-inf"), tl.float32),
        tl.zeros([BLOCK_TOKENS * BLOCK_HEADS], tl.float32),
        main,
        rest,
        cache + (kv_head % GROUP_HEADS) * PAGE * width,
        table + segment.to(tl.int64) * pages * groups + kv_head // GROUP_HEADS,
        0,
        tl.minimum(reached, (tokens + PAGE - 1) // PAGE),
        tokens,
        start + token,
        shard,
        shards,
        scale,
        groups,
        unit,
        plane,
        MAIN,
        REST,
        BLOCK_MAIN,
        BLOCK_REST,
        PAGE,
        TILE,
        True,
        STAGES,
        PRECISION,
    )
    empty = total == 0.0
    column = tl.arange(0, BLOCK_MAIN)
    target = rows * HEADS + heads
    tl.store(
        out + target[:, None] * MAIN + column[None, :],
        acc / tl.where(empty, 1.0, total)[:, None],
        mask=held[:, None] & (column < MAIN)[None, :],
    )
    found = tl.where(empty, float("-inf"), (top + tl.log2(tl.where(empty, 1.0, total))) * 0.6931471805599453)
    tl.store(lse + target, found, mask=held)


@_jit
def append_kernel(
    cache,
    entries,
    sources,
    units,
    offsets,
    entry_row,
    entry_plane,
    entry_head,
    GROUPS: tl.constexpr,
    GROUP_HEADS: tl.constexpr,
    PLANES: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write token i, entry ``sources[i]`` of ``[n, PLANES, GROUPS * GROUP_HEADS, WIDTH]`` with the given strides, at
    ``offsets[i]`` in ``units[i]`` (int32 ``[m, GROUPS]``); none where the offset is negative.
    """
    token, head, plane = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    offset = tl.load(offsets + token)
    if offset < 0:
        return
    source = tl.load(sources + token).to(tl.int64)
    unit = tl.load(units + token * GROUPS + head // GROUP_HEADS).to(tl.int64)
    column = tl.arange(0, BLOCK)
    values = tl.load(
        entries + source * entry_row + plane * entry_plane + head * entry_head + column, mask=column < WIDTH
    )
    target = ((unit * PLANES + plane) * GROUP_HEADS + head % GROUP_HEADS) * PAGE + offset
    tl.store(cache + target * WIDTH + column, values, mask=column < WIDTH)
