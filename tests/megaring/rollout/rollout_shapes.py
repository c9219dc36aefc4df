"""Shapes and batches that several tests of the planner use."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from megaring.rollout.blocks import History, PageTable
from megaring.rollout.shape import MlaShape, ModelShape

_PATH = Path(__file__).parents[4] / "shared" / "oracles" / "splash.json"
ORACLE = json.loads(_PATH.read_text()) if _PATH.exists() else None
NO_ORACLE = "the numbers of SPLASH (splash.json) are not on this machine"

V3 = ModelShape("DeepSeek-V3", 61, 7168, 128, 128, 128, mla=MlaShape(1536, 512, 128, 64, 128))
V2_LITE = ModelShape("DeepSeek-V2-Lite", 27, 2048, 16, 16, 128, mla=MlaShape(None, 512, 128, 64, 128))
QWEN3 = ModelShape("Qwen3-30B-A3B", 48, 2048, 32, 4, 128)


def balanced(requests: int, ranks: int, pages_per_rank: int) -> PageTable:
    """Requests dealt round-robin, each of the same number of whole pages on every rank under CP."""
    length = 64 * ranks * pages_per_rank
    return PageTable.from_histories([History(i, i % ranks, length) for i in range(requests)], ranks)


def random_histories(seed: int, ranks: int, requests: int = 9) -> list[History]:
    """Uneven lengths, some owners empty, some requests that share leading pages with earlier ones across owners."""
    draw = np.random.default_rng(seed)
    owners = draw.choice(ranks, size=max(1, ranks - 1), replace=False)  # at least one owner stays empty
    made: list[History] = []
    for request in range(requests):
        length = int(draw.integers(0, 500))
        origins: tuple[int, ...] = ()
        if made and draw.random() < 0.5:
            parent = made[int(draw.integers(len(made)))]
            shared = min(parent.length // 64, length // 64, int(draw.integers(1, 5)))
            own = parent.origins + (parent.request,) * (parent.length // 64 - len(parent.origins))
            origins = own[:shared]
        made.append(History(request, int(draw.choice(owners)), length, origins))
    return made
