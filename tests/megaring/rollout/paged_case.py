"""Random paged caches with NaN wherever no token lies, and attention over them in fp64, one request at a time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from megaring.rollout.layout import PAGE


@dataclass(frozen=True)
class Case:
    """Sizes of an attention: ``planes`` 2 for GQA, 1 for MLA, whose values are the leading ``value_width`` elements."""

    heads: int
    kv_heads: int
    width: int
    value_width: int
    planes: int
    groups: int = 1


GQA = Case(32, 4, 128, 128, 2)
MLA_16 = Case(16, 1, 576, 512, 1)
MLA_128 = Case(128, 1, 576, 512, 1)


@dataclass(frozen=True, eq=False)
class Cached:
    """``cache [units, planes, group heads, 64, width]``, ``table`` int32 ``[rows, pages, groups]`` and the tokens of
    each row ``[planes, heads, length, width]``.
    """

    cache: torch.Tensor
    table: torch.Tensor
    tokens: list[torch.Tensor]


def fill(case: Case, lengths: list[int], dtype: torch.dtype, device: str, seed: int = 0, spare: int = 3) -> Cached:
    """Tokens of every row in pages that lie in random order among ``spare`` more, which nobody has."""
    generator = torch.Generator(device).manual_seed(seed)
    counts = [-(-length // PAGE) for length in lengths]
    units = sum(counts) * case.groups + spare
    group_heads = case.kv_heads // case.groups
    cache = torch.full((units, case.planes, group_heads, PAGE, case.width), float("nan"), dtype=dtype, device=device)
    order = np.random.default_rng(seed).permutation(units).astype(np.int32)
    # Places of no page hold what there may be in a table: nothing that may be read.
    table = np.full((len(lengths), max(1, *counts, 1) + 1, case.groups), 2**31 - 1, np.int32)
    tokens, used = [], 0
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        here = order[used : used + count * case.groups].reshape(count, case.groups)
        used += count * case.groups
        table[row, :count] = here
        made = torch.randn(
            (case.planes, case.kv_heads, length, case.width), generator=generator, device=device, dtype=torch.float32
        ).to(dtype)
        tokens.append(made)
        for page in range(count):
            part = made[:, :, page * PAGE : (page + 1) * PAGE]
            for group in range(case.groups):
                target = cache[int(here[page, group])]
                target[:, :, : part.shape[2]] = part[:, group * group_heads : (group + 1) * group_heads]
    return Cached(cache, torch.from_numpy(table).to(device), tokens)


def ends_of(lengths: list[int], device: str) -> torch.Tensor:
    """Pages of the rows so far, int32."""
    return torch.tensor([-(-length // PAGE) for length in lengths], device=device).cumsum(0).int()


def plain(
    case: Case, queries: torch.Tensor, tokens: torch.Tensor, visible: torch.Tensor | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """fp64 attention of ``queries [n, heads, width]`` over ``tokens [planes, kv heads, m, width]``, ``visible [n, m]``:
    ``[n, heads, value width]`` and LSE ``[n, heads]``; 0 and -inf without a key.
    """
    share = case.heads // case.kv_heads
    asked = queries.double().unflatten(1, (case.kv_heads, share))
    keys, values = tokens[0].double(), tokens[-1, ..., : case.value_width].double()
    scores = torch.einsum("nkhd,kmd->nkhm", asked, keys) * scale
    if visible is not None:
        scores.masked_fill_(~visible[:, None, None], float("-inf"))
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - lse.masked_fill(lse == float("-inf"), 0.0)[..., None])
    return torch.einsum("nkhm,kmd->nkhd", weights, values).flatten(1, 2), lse.flatten(1, 2)


def check(
    found: tuple[torch.Tensor, torch.Tensor],
    wanted: tuple[torch.Tensor, torch.Tensor],
    error: float,
    lse_error: float = 2e-6,
) -> None:
    """Results are within ``error`` of the largest of their row, LSEs within ``lse_error`` of theirs or of 1; both are 0
    and -inf where they should.
    """
    (out, lse), (expected, expected_lse) = found, wanted
    assert out.dtype == lse.dtype == torch.float32
    assert out.isfinite().all()
    empty = expected_lse == float("-inf")
    assert ((lse == float("-inf")) == empty).all()
    assert (out[empty] == 0).all()
    largest = expected.abs().amax(dim=(1, 2), keepdim=True).clamp(min=1e-30)
    assert float(((out.double() - expected).abs() / largest).max()) <= error
    off = (lse.double() - expected_lse)[~empty].abs() / expected_lse[~empty].abs().clamp(min=1)
    assert float(off.max()) <= lse_error if len(off) else True
