"""Placements and an oracle that the attention tests share: plain fp64 attention of whole sequences in one process."""

from __future__ import annotations

from dataclasses import dataclass

import torch

import megaring
from buddyring import Placement, Shards

RESULTS = ("out", "lse", "dq", "dk", "dv")


@dataclass(frozen=True)
class Case:
    """A placement with small tiles: ``groups[i]`` is the (start, size) of the sequence of ``lengths[i]`` tokens."""

    ranks: int
    lengths: tuple[int, ...]
    groups: tuple[tuple[int, int], ...]
    tile: int = 4
    rank_multiple: int = 1

    def placement(self) -> Placement:
        return Placement.from_groups(
            self.lengths, self.ranks, self.groups, tile=self.tile, rank_multiple=self.rank_multiple
        )


CASES = {
    "1 rank": Case(1, (1, 7, 33, 7, 7, 2), ((0, 1),) * 6, rank_multiple=8),
    "2 ranks, mixed": Case(2, (21, 9, 13, 4, 40), ((0, 2), (0, 1), (1, 1), (0, 2), (0, 2))),
    "3 ranks, one empty": Case(3, (11, 5, 6), ((0, 1), (2, 1), (0, 1)), rank_multiple=4),
    "4 ranks, mixed": Case(4, (50, 8, 30, 17, 3, 20, 9), ((0, 4), (0, 4), (0, 2), (2, 2), (1, 1), (2, 2), (3, 1))),
    "4 ranks, one empty": Case(4, (37, 16, 5), ((0, 2), (0, 2), (2, 1)), tile=1, rank_multiple=4),
    "6 ranks, pairs": Case(6, (26, 11, 4, 19, 7), ((0, 2), (2, 2), (2, 2), (4, 2), (5, 1))),
    "8 ranks, one sequence": Case(8, (203,), ((0, 8),), tile=8),
    "8 ranks, mixed": Case(
        8,
        (90, 16, 31, 8, 12, 25, 4, 5, 1, 64),
        ((0, 8), (0, 8), (4, 4), (0, 4), (6, 2), (0, 2), (6, 2), (3, 1), (7, 1), (0, 4)),
        rank_multiple=2,
    ),
}


@dataclass(frozen=True)
class Inputs:
    """Tensors of all tokens of a step, in input order: ``q, dout [T, Hq, D]``, ``k, v [T, Hkv, D]``."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.q, self.k, self.v, self.dout


def make_inputs(tokens: int, heads: tuple[int, int], head_dim: int, dtype: torch.dtype, seed: int = 0) -> Inputs:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(tokens, count, head_dim) for count in (heads[0], heads[1], heads[1], heads[0])]
    return Inputs(*(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes))


def whole_attention(q, k, v, lengths, *, causal=True, scale=None):
    """Output and LSE of whole sequences, written without any of the tested code; differentiable."""
    repeat = q.shape[1] // k.shape[1]
    outs, lses = [q[:0]], [q.detach()[:0, :, 0]]
    for qs, ks, vs in zip(*(x.split(list(lengths)) for x in (q, k, v)), strict=True):
        scores = torch.einsum("qhd,khd->hqk", qs, ks.repeat_interleave(repeat, dim=1))
        scores = scores * (q.shape[2] ** -0.5 if scale is None else scale)
        if causal:
            hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
            scores = scores.masked_fill(hidden, float("-inf"))
        outs.append(torch.einsum("hqk,khd->qhd", scores.softmax(dim=-1), vs.repeat_interleave(repeat, dim=1)))
        lses.append(scores.detach().logsumexp(dim=-1).t())
    return torch.cat(outs), torch.cat(lses)


def oracle(inputs: Inputs, lengths: tuple[int, ...], *, causal: bool = True, softmax_scale: float | None = None):
    """``RESULTS`` of whole sequences in fp64."""
    q, k, v = (x.double().clone().requires_grad_() for x in inputs.tensors()[:3])
    out, lse = whole_attention(q, k, v, lengths, causal=causal, scale=softmax_scale)
    grads = torch.autograd.grad(out, (q, k, v), inputs.dout.double())
    return (out.detach(), lse, *grads)


def run_rank(placement: Placement, rank: int, inputs: Inputs, **options):
    """One rank's ``RESULTS`` on its rows, dummies included, with NaN in all that dummies hold."""
    shards = placement.shards(rank)
    q, k, v, dout = (place_rows(x, shards).requires_grad_(i < 3) for i, x in enumerate(inputs.tensors()))
    out, lse = megaring.attention(q, k, v, shards, return_lse=True, **options)
    out.backward(dout)
    return tuple(x.detach() for x in (out, lse, q.grad, k.grad, v.grad))


def run_case(rank: int, world_size: int, case: Case, inputs: Inputs, options: dict):
    """``run_rank`` as the pool calls it."""
    return run_rank(case.placement(), rank, inputs, **options)


def place_rows(x: torch.Tensor, shards: Shards) -> torch.Tensor:
    """This rank's rows of a tensor of all tokens; NaN in dummy rows."""
    rows = x.new_full((shards.rows, *x.shape[1:]), float("nan"))
    rows[: shards.num_tokens] = x[torch.tensor(shards.tokens)]
    return rows


def gather_rows(case: Case, parts: list[torch.Tensor]) -> torch.Tensor:
    """Tensors of each rank's rows as one of all tokens; dummy rows are left out."""
    whole = torch.full((sum(case.lengths), *parts[0].shape[1:]), float("nan"), dtype=parts[0].dtype)
    for rank, part in enumerate(parts):
        shards = case.placement().shards(rank)
        whole[torch.tensor(shards.tokens)] = part[: shards.num_tokens]
    return whole


def relative_error(value: torch.Tensor, expected: torch.Tensor) -> float:
    """Root mean square of the difference over that of the expected values; 0 for two empty tensors."""
    assert value.shape == expected.shape
    if expected.numel() == 0:
        return 0.0
    scale = expected.double().norm().item()
    return (value.double() - expected.double()).norm().item() / max(scale, 1e-30)
