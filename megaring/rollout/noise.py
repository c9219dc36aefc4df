"""Sampling noise that is a pure function of (seed, sample, token index, vocabulary entry).

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011, section 3.3) is a bijection of a
128-bit counter under a 64-bit key. There is no state: a row draws the same noise alone, in any batch, in any layout and
after a preemption. Integer operations only, so every device gives the same words.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)  # golden ratio and sqrt(3) - 1, as the paper has them
_ROUNDS = 10


def philox(counter: Sequence[torch.Tensor], key: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Four words of output for four words of ``counter`` under two words of ``key``.

    All are int64 tensors of values below 2^32 that broadcast against each other; so are the results.
    """
    a, b, c, d = counter
    first, second = key
    for turn in range(_ROUNDS):
        if turn:
            first, second = (first + _KEY_STEPS[0]) & _WORD, (second + _KEY_STEPS[1]) & _WORD
        # The 64-bit products wrap into the sign bit, which leaves the bits of both halves as they are.
        low, high = a * _MULTIPLIERS[0], c * _MULTIPLIERS[1]
        a, b, c, d = (
            (high >> 32) & _WORD ^ b ^ first,
            high & _WORD,
            (low >> 32) & _WORD ^ d ^ second,
            low & _WORD,
        )
    return a, b, c, d


def gumbel(
    seeds: Sequence[int], samples: Sequence[int], indices: Sequence[int], entries: int, device: torch.device
) -> torch.Tensor:
    """Standard Gumbel noise, float64 ``[n, entries]``, for n rows.

    Row i is that of token ``indices[i]`` of sample ``samples[i]`` under ``seeds[i]`` (below 2^64). Entry v takes 52
    bits of the Philox block with counter (v // 2, index, sample, 0), so its uniform lies strictly between 0 and 1.
    """
    blocks = torch.arange((entries + 1) // 2, device=device)

    def column(values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(list(values), dtype=torch.int64, device=device)[:, None]

    key = column([seed & _WORD for seed in seeds]), column([seed >> 32 for seed in seeds])
    counter = blocks, column(indices), column(samples), torch.zeros_like(blocks)
    a, b, c, d = torch.broadcast_tensors(*philox(counter, key))
    words = torch.stack((a >> 5 << 25 | b >> 7, c >> 5 << 25 | d >> 7), dim=-1)  # 27 and 25 bits
    uniform = (words.flatten(1)[:, :entries].double() + 0.5) * 2.0**-52
    return -torch.log(-torch.log(uniform))
