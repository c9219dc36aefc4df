"""Philox against the known answers that its authors publish with Random123, and the noise made of it."""

from __future__ import annotations

import math

import pytest
import torch

from megaring.rollout.noise import gumbel, philox

# kat_vectors of Random123 for philox4x32 with 10 rounds: counter, key, output.
ZEROS, ONES = (0,) * 6, (0xFFFFFFFF,) * 6
PI = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0)
KNOWN = [
    (ZEROS, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (ONES, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (PI, (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
]
CPU = torch.device("cpu")


@pytest.mark.parametrize(("words", "expected"), KNOWN)
def test_known_answers(words, expected):
    words = [torch.tensor([word]) for word in words]
    assert tuple(int(word) for word in philox(words[:4], words[4:])) == expected


def test_a_row_does_not_depend_on_its_batch():
    together = gumbel([5, 2**63 + 9, 5], [0, 1, 0], [7, 0, 8], 11, CPU)
    assert torch.equal(together[1:2], gumbel([2**63 + 9], [1], [0], 11, CPU))
    assert torch.equal(together[:1, :7], gumbel([5], [0], [7], 7, CPU))
    assert not torch.isin(together[0], together[2]).any()


def test_every_part_of_the_name_changes_all_of_the_noise():
    base = gumbel([1], [2], [3], 64, CPU)
    for other in (([2], [2], [3]), ([1 + 2**32], [2], [3]), ([1], [3], [3]), ([1], [2], [4])):
        assert not torch.isin(gumbel(*other, 64, CPU), base).any()
    assert len(base.unique()) == 64


def test_it_is_gumbel_noise():
    """The largest distance of the empirical distribution from exp(-exp(-x)); 0.1 % of samples exceed 1.95 / sqrt(n)."""
    noise = gumbel([3] * 100, [0] * 100, range(100), 1001, CPU).flatten().sort().values
    ranks = torch.arange(1, len(noise) + 1) / len(noise)
    assert (torch.exp(-torch.exp(-noise)) - ranks).abs().max() < 1.95 / math.sqrt(len(noise))
    assert noise.isfinite().all()
