"""From logits to tokens: the sampling transforms, the Gumbel-max draw, and log-probabilities before and after them.

Transforms come in this order: banned tokens, temperature, top-k, top-p. Everything is computed in float64, row by row
independent of the batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from megaring.rollout.noise import gumbel

_BLOCK = 1 << 23  # elements of logits that are worked on at once: 64 MiB in float64


@dataclass(frozen=True)
class Draw:
    """What one draw needs beside its logits.

    ``seed``, ``sample``, ``index``: name the noise. ``temperature`` 0 takes the most likely token. ``top_k`` 0 and
    ``top_p`` 1 keep all tokens. ``banned``: ids that may not come. ``alternatives``: how many of the most likely tokens
    to report.
    """

    seed: int
    sample: int
    index: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    banned: tuple[int, ...] = ()
    alternatives: int = 0


@dataclass(frozen=True)
class Drawn:
    """A token with its log-probability under the model (``logprob``) and under the distribution that it was drawn from
    (``sampling_logprob``; 0 for a greedy one). ``alternatives``: (id, logprob) of the most likely ones under the model.
    """

    token: int
    logprob: float
    sampling_logprob: float
    alternatives: tuple[tuple[int, float], ...] = ()


def sample(logits: torch.Tensor, rows: Sequence[int], draws: Sequence[Draw]) -> list[Drawn | None]:
    """Draw i is made from row ``rows[i]`` of ``logits`` ``[n, vocab]``; None where that row is no distribution.

    That is a row with a NaN or +inf, or one in which every token that is not banned is at -inf.
    """
    found: list[Drawn | None] = []
    for part in _blocks(len(draws), logits.shape[-1]):
        found += _sample_block(logits[list(rows[part])].double(), draws[part])
    return found


def transform(logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """Log-probabilities ``[n, vocab]`` that draws are made from, float64; greedy rows are left at temperature 1.

    Top-k keeps exactly k tokens, of equal ones those with the lowest ids. Top-p keeps the shortest run of most likely
    tokens, of those that top-k left, whose probabilities add up to at least ``top_p``.
    """
    scores = logits.double().clone()
    for row, draw in enumerate(draws):
        if draw.banned:
            scores[row, list(draw.banned)] = -torch.inf
    temperatures = torch.tensor([draw.temperature or 1.0 for draw in draws], dtype=torch.float64, device=scores.device)
    # The largest becomes 0 first, so that no temperature, however low, makes an infinity.
    scores = (scores - scores.amax(dim=-1, keepdim=True)) / temperatures[:, None]
    cut = [row for row, draw in enumerate(draws) if draw.temperature and (draw.top_k or draw.top_p < 1)]
    if cut:
        scores[cut] = _truncate(scores[cut], [draws[row] for row in cut])
    return scores.log_softmax(dim=-1)


def token_logprobs(
    logits: torch.Tensor, tokens: Sequence[int], alternatives: int
) -> list[tuple[float, tuple[tuple[int, float], ...]]]:
    """For every row of ``logits`` ``[n, vocab]``: the model's log-probability of its token, and the likeliest ones."""
    found = []
    for part in _blocks(len(tokens), logits.shape[-1]):
        raw = logits[part].double().log_softmax(dim=-1)
        chosen = raw.gather(1, torch.tensor(tokens[part], device=raw.device)[:, None])[:, 0].tolist()
        found += zip(chosen, _likeliest(raw, [alternatives] * len(chosen)), strict=True)
    return found


def _sample_block(logits: torch.Tensor, draws: Sequence[Draw]) -> list[Drawn | None]:
    raw = logits.log_softmax(dim=-1)
    after = transform(logits, draws)
    noise = torch.zeros_like(after)
    noisy = [row for row, draw in enumerate(draws) if draw.temperature]
    if noisy:
        each = [draws[row] for row in noisy]
        names = ([d.seed for d in each], [d.sample for d in each], [d.index for d in each])
        noise[noisy] = gumbel(*names, after.shape[-1], after.device)
    chosen = (after + noise).argmax(dim=-1, keepdim=True)
    columns = (chosen, raw.gather(1, chosen), after.gather(1, chosen))
    tokens, before, drawn_from = (column[:, 0].tolist() for column in columns)
    likeliest = _likeliest(raw, [draw.alternatives for draw in draws])
    return [
        Drawn(token, logprob, drawn if draw.temperature else 0.0, top)
        if math.isfinite(logprob) and math.isfinite(drawn)
        else None
        for token, logprob, drawn, top, draw in zip(tokens, before, drawn_from, likeliest, draws, strict=True)
    ]


def _truncate(scores: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    ordered, order = scores.sort(dim=-1, descending=True, stable=True)
    limits = torch.tensor([draw.top_k or scores.shape[-1] for draw in draws], device=scores.device)[:, None]
    ordered = ordered.masked_fill(torch.arange(scores.shape[-1], device=scores.device) >= limits, -torch.inf)
    masses = torch.tensor([draw.top_p for draw in draws], dtype=torch.float64, device=scores.device)[:, None]
    probabilities = ordered.softmax(dim=-1)
    ahead = probabilities.cumsum(dim=-1) - probabilities  # what the tokens before this one add up to
    ordered = ordered.masked_fill((ahead >= masses) & (masses < 1), -torch.inf)
    return torch.empty_like(scores).scatter_(1, order, ordered)


def _likeliest(raw: torch.Tensor, counts: Sequence[int]) -> list[tuple[tuple[int, float], ...]]:
    most = min(max(counts, default=0), raw.shape[-1])
    if not most:
        return [()] * len(counts)
    values, ids = (part.tolist() for part in raw.topk(most, dim=-1))
    return [
        tuple(zip(row_ids[:count], row_values[:count], strict=True))
        for row_ids, row_values, count in zip(ids, values, counts, strict=True)
    ]


def _blocks(rows: int, vocabulary: int) -> Iterator[slice]:
    step = max(1, _BLOCK // vocabulary)
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))
