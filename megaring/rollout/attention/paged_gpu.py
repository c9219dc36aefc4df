"""Attention over pages by the Triton kernels of ``paged_kernels``: their launches and tilings.

Launches depend on shapes and tilings only, and lengths are read on the device, so CUDA graphs can hold them.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from megaring.errors import UserError
from megaring.rollout.attention.segments import Segments
from megaring.rollout.layout import PAGE
from megaring.rollout.pages import Pages
from megaring.rollout.uploads import upload

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_LOG2_E = 1.4426950408889634
_CHUNK_LANES = 128  # query rows (tokens x heads) of a program, 64 where results are wide
_PIECES = 32  # partial results that the combine reads at once
_LEAST_BLOCK_ROWS = 32  # whose ends a program looks through; every other power of two above is another kernel
_MOST_ROWS = 4096  # of a decode batch; every program reads all their lengths


@dataclass(frozen=True)
class Tiling:
    """How a kernel is cut: ``tile`` keys at a time (a divisor of 64), ``stages`` of Triton's pipeline, ``warps``,
    ``heads`` query heads of one program (at least 16 in decode, the rows of a matrix instruction).

    ``programs``: how many there are to be on a multiprocessor. A pipeline of s stages keeps about (s - 2) / 2 tiles in
    flight, since the loads of a tile follow that of its unit.
    """

    tile: int
    stages: int
    warps: int
    heads: int
    programs: int = 1


def decode_tiling(planes: int, main: int, share: int, itemsize: int) -> Tiling:
    """The tiling of decode for results of ``main`` elements and ``share`` query heads a cache head.

    Chosen by shared memory and registers that the compiler reports for sm_90: GQA of width 128 in bf16 takes 72 KiB
    and three programs fit on a multiprocessor; MLA with 16 heads 93 KiB and two fit. Wide elements get smaller tiles.
    """
    narrow = itemsize <= 2
    if main <= 128 and planes == 2:
        return Tiling(64 if narrow else 32, 6, 4, min(64, max(16, _power(share))), 3)
    if share <= 16:
        return Tiling(32 if narrow else 16, 6, 8, 16, 2)
    return Tiling(32 if narrow else 16, 4, 8, 32, 2)


def chunk_tiling(main: int, share: int, itemsize: int) -> Tiling:
    """The tiling of chunks, of which a program has ``lanes(tiling)`` query rows."""
    narrow, wide = itemsize <= 2, main > 128
    return Tiling(32 if wide or not narrow else 64, 3, 8, min(_lanes(main), _power(share)))


def require_triton() -> None:
    """Raise UserError, with the remedy, where Triton cannot be imported."""
    try:
        import triton  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"attention of a rollout on a GPU needs Triton, which torch for CUDA brings along on Linux ({error}); "
            "pip install triton, or run the rollout on a CPU"
        ) from None


def attend(
    queries: torch.Tensor, pages: Pages, layer: int, groups: range, segments: Segments, *, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """``paged.attend`` by kernels; bf16, fp16 or fp32 queries and cache of one type."""
    require_triton()
    cache, value_width = pages.units, pages.entry.value_width
    singles, chunks = segments.singles, segments.chunks
    queries = queries.contiguous()
    found = None
    if singles is not None:
        found = decode(
            queries if singles.rows is None else queries[singles.rows],
            cache,
            singles.units(pages, layer, groups),
            singles.lengths,
            singles.ends,
            scale=scale,
            value_width=value_width,
        )
        if singles.rows is None:
            return found
    out = queries.new_zeros((*queries.shape[:2], value_width), dtype=torch.float32)
    lse = queries.new_full(queries.shape[:2], float("-inf"), dtype=torch.float32)
    if found is not None:
        out[singles.rows], lse[singles.rows] = found
    if chunks is not None:
        attend_chunks(
            out,
            lse,
            queries,
            cache,
            chunks.units(pages, layer, groups),
            chunks.segments,
            chunks.counts,
            scale=scale,
            shard=segments.shard,
            shards=segments.shards,
        )
    return out, lse


def decode(
    queries: torch.Tensor,
    cache: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    ends: torch.Tensor,
    *,
    scale: float,
    value_width: int,
    tiling: Tiling | None = None,
    ranges: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of one query a row over its pages, with its LSE.

    queries: ``[rows, heads, width]``, the heads of each cache head together. cache: ``[units, planes, group heads, 64,
    width]`` of the same type; keys are the first plane, values the first ``value_width`` elements of the last. table:
    int32 ``[rows, pages, groups]`` units. lengths: int32 ``[rows]`` cached tokens, which may be 0. ends: int32
    ``[rows]``, pages of the rows so far. Returns fp32 ``[rows, heads, value_width]`` and natural-log LSE
    ``[rows, heads]``; 0 and -inf for a row of length 0.

    ``ranges``: programs over which the pages of all rows are divided, by default as many as fit on the GPU at once.
    Partial results stay in fp32 until they are merged. Nothing here waits for the device.
    """
    from megaring.rollout.attention import paged_kernels

    rows, heads, width = queries.shape
    _, planes, group_heads, _, _ = cache.shape
    _check(queries, cache, table, value_width)
    if rows > _MOST_ROWS:
        raise ValueError(f"decode of {rows} rows; at most {_MOST_ROWS} in one call")
    kv_heads = table.shape[2] * group_heads
    share = heads // kv_heads
    tiling = tiling or decode_tiling(planes, value_width, share, cache.itemsize)
    programs = kv_heads * -(-share // tiling.heads)
    if ranges is None:
        ranges = max(1, multiprocessors(queries.device) * tiling.programs // programs)
    ranges = max(1, min(ranges, rows * table.shape[1]))
    out = queries.new_empty((rows, heads, value_width), dtype=torch.float32)
    lse = queries.new_empty((rows, heads), dtype=torch.float32)
    if not rows:
        return out, lse
    partial = queries.new_empty((rows + ranges, heads, value_width), dtype=torch.float32)
    partial_lse = queries.new_empty((rows + ranges, heads), dtype=torch.float32)
    block_main = max(16, _power(value_width))
    paged_kernels.decode_kernel[(programs, ranges)](
        partial,
        partial_lse,
        queries,
        cache,
        table,
        lengths,
        ends,
        rows,
        table.shape[1],
        ranges,
        scale * _LOG2_E,
        HEADS=heads,
        KV_HEADS=kv_heads,
        GROUP_HEADS=group_heads,
        PLANES=planes,
        MAIN=value_width,
        REST=width - value_width,
        PAGE=PAGE,
        BLOCK_ROWS=max(_LEAST_BLOCK_ROWS, _power(rows)),
        BLOCK_HEADS=tiling.heads,
        BLOCK_MAIN=block_main,
        BLOCK_REST=max(16, _power(width - value_width)),
        TILE=tiling.tile,
        STAGES=tiling.stages,
        PRECISION="ieee",
        num_warps=tiling.warps,
        num_stages=tiling.stages,
    )
    block = min(128, block_main)
    paged_kernels.combine_kernel[(rows, heads, -(-value_width // block))](
        out,
        lse,
        partial,
        partial_lse,
        ends,
        rows,
        ranges,
        HEADS=heads,
        MAIN=value_width,
        BLOCK=block,
        PIECES=_PIECES,
    )
    return out, lse


def attend_chunks(
    out: torch.Tensor,
    lse: torch.Tensor,
    queries: torch.Tensor,
    cache: torch.Tensor,
    table: torch.Tensor,
    segments: torch.Tensor,
    counts: tuple[int, ...],
    *,
    scale: float,
    shard: int = 0,
    shards: int = 1,
    tiling: Tiling | None = None,
) -> None:
    """Fill the rows of ``segments`` in ``out`` fp32 ``[n, heads, value width]`` and ``lse`` fp32 ``[n, heads]``: causal
    attention of several new tokens of each of some requests. queries, cache and table as in ``decode``; segments and
    counts as in ``Chunks``, shard and shards as in ``Segments``.
    """
    from megaring.rollout.attention import paged_kernels

    _, heads, width = queries.shape
    _, planes, group_heads, _, _ = cache.shape
    value_width = out.shape[2]
    _check(queries, cache, table, value_width)
    kv_heads = table.shape[2] * group_heads
    share = heads // kv_heads
    tiling = tiling or chunk_tiling(value_width, share, cache.itemsize)
    tokens = max(1, _lanes(value_width) // tiling.heads)
    blocks = upload(_blocks(counts, tokens), queries.device)
    paged_kernels.chunk_kernel[(kv_heads * -(-share // tiling.heads), len(blocks))](
        out,
        lse,
        queries,
        cache,
        table,
        blocks,
        segments,
        table.shape[1],
        shard,
        shards,
        scale * _LOG2_E,
        HEADS=heads,
        KV_HEADS=kv_heads,
        GROUP_HEADS=group_heads,
        PLANES=planes,
        MAIN=value_width,
        REST=width - value_width,
        PAGE=PAGE,
        BLOCK_TOKENS=tokens,
        BLOCK_HEADS=tiling.heads,
        BLOCK_MAIN=max(16, _power(value_width)),
        BLOCK_REST=max(16, _power(width - value_width)),
        TILE=tiling.tile,
        STAGES=tiling.stages,
        PRECISION="ieee",
        num_warps=tiling.warps,
        num_stages=tiling.stages,
    )


def append(
    cache: torch.Tensor, entries: torch.Tensor, sources: torch.Tensor, units: torch.Tensor, offsets: torch.Tensor
) -> None:
    """Write entry ``sources[i]`` of ``entries [n, planes, heads, width]`` at ``offsets[i]`` in ``units[i]``.

    sources: int64 ``[m]``. units: int32 ``[m, groups]``. offsets: int32 ``[m]``; a negative one writes nothing.
    """
    from megaring.rollout.attention import paged_kernels

    _, planes, group_heads, page, width = cache.shape
    if entries.stride(-1) != 1:
        entries = entries.contiguous()
    if not len(sources):
        return
    paged_kernels.append_kernel[(len(sources), units.shape[1] * group_heads, planes)](
        cache,
        entries,
        sources,
        units,
        offsets,
        *entries.stride()[:3],
        GROUPS=units.shape[1],
        GROUP_HEADS=group_heads,
        PLANES=planes,
        WIDTH=width,
        PAGE=page,
        BLOCK=_power(width),
    )


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Of a GPU; 4 for the CPU, where the kernels run interpreted."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def _check(queries: torch.Tensor, cache: torch.Tensor, table: torch.Tensor, value_width: int) -> None:
    heads, kv_heads = queries.shape[1], table.shape[2] * cache.shape[2]
    if queries.dtype != cache.dtype or cache.dtype not in DTYPES:
        raise TypeError(f"queries are {queries.dtype} and the cache {cache.dtype}; both are to be bf16, fp16 or fp32")
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads do not divide by {kv_heads} cache heads")
    if queries.shape[2] != cache.shape[4] or not 1 <= value_width <= cache.shape[4]:
        raise ValueError(
            f"queries have {queries.shape[2]} elements, entries {cache.shape[4]}, of which {value_width} are values"
        )
    if cache.shape[1] == 2 and value_width != cache.shape[4]:
        raise ValueError(f"values of their own plane have {cache.shape[4]} elements, not {value_width}")
    if not (queries.is_contiguous() and cache.is_contiguous() and table.is_contiguous()):
        raise ValueError("queries, cache and block table are to be contiguous")


def _blocks(counts: tuple[int, ...], tokens: int) -> NDArray[np.int32]:
    parts = [
        np.stack([np.full(-(-count // tokens), place), np.arange(0, count, tokens)], axis=1)
        for place, count in enumerate(counts)
    ]
    return np.concatenate(parts).astype(np.int32)


def _lanes(main: int) -> int:
    return _CHUNK_LANES if main <= 128 else _CHUNK_LANES // 2


def _power(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()
