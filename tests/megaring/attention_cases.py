"""Placements and an oracle that the attention tests share: plain fp64 attention of whole sequences in one process."""

from __future__ import annotations

from dataclasses import dataclass

import torch

import megaring
from buddyring import Placement


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


def oracle(inputs: Inputs, lengths: tuple[int, ...], *, causal: bool = True, scale: float | None = None):
    """``out, lse, dq, dk, dv`` of whole sequences in fp64, written without any of the tested code."""
    q, k, v, dout = (x.double() for x in inputs.tensors())
    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
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
    out = torch.cat(outs)
    grads = torch.autograd.grad(out, (q, k, v), dout)
    return (out.detach(), torch.cat(lses), *grads)


def run_rank(placement: Placement, rank: int, inputs: Inputs, **options):
    """One rank's ``out, lse, dq, dk, dv`` on its rows, dummies included, with NaN in all that dummies hold."""
    shards = placement.shards(rank)
    q, k, v, dout = (place_rows(x, shards).requires_grad_(i < 3) for i, x in enumerate(inputs.tensors()))
    out, lse = megaring.attention(q, k, v, shards, return_lse=True, **options)
    out.backward(dout)
    return tuple(x.detach() for x in (out, lse, q.grad, k.grad, v.grad))


def place_rows(x: torch.Tensor, shards) -> torch.Tensor:
    """This rank's rows of a tensor of all tokens; NaN in dummy rows."""
    rows = x.new_full((shards.rows, *x.shape[1:]), float("nan"))
    rows[: shards.num_tokens] = x[torch.tensor(shards.tokens)]
    return rows


def relative_error(value: torch.Tensor, expected: torch.Tensor) -> float:
    """Root mean square of the difference over that of the expected values; 0 for two empty tensors."""
    if expected.numel() == 0:
        return 0.0
    scale = expected.double().norm().item()
    return (value.double() - expected.double()).norm().item() / max(scale, 1e-30)
