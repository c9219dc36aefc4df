"""The mixes on several real GPUs, one process each, with one or several virtual ranks per GPU.

    torchrun --standalone --nproc-per-node=2 -m megaring.kernels.checks.pair --virtual 4 --out pair.json

Every process judges the rows that it holds; the sums that make up a sequence's error are added over all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from buddyring.placement import Placement
from megaring.kernels.arena import ArenaLayout, Domain
from megaring.kernels.checks.bank import Bank
from megaring.kernels.checks.forward import Case
from megaring.kernels.checks.mixes import MIXES, mix, row_of, summary
from megaring.kernels.forward_plan import arena_tiles
from megaring.kernels.symmetric import SymmetricDomain

LONGEST_WAIT = 120.0  # seconds that a collective of the checks may take


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the mixes and write the rows on rank 0; 1 when one failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--virtual", type=int, default=1, choices=(1, 2, 4), help="ranks per GPU; default: 1")
    parser.add_argument("--mixes", type=int, default=MIXES, help=f"how many; default: {MIXES}")
    parser.add_argument("--seconds", type=float, default=300.0, help="no mix begins after this")
    parser.add_argument("--wait-seconds", type=float, default=5.0, help="bound of the kernel's waits")
    parser.add_argument("--out", type=Path, help="where to write the rows as JSON")
    options = parser.parse_args(arguments)
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device, timeout=timedelta(seconds=LONGEST_WAIT))
    try:
        rows = run(options, device)
        if dist.get_rank() == 0:
            print(f"{dist.get_world_size()} GPUs x {options.virtual} ranks: {summary(rows)}")
            if options.out is not None:
                _write(options, rows)
        return int(not all(row["passed"] for row in rows))
    finally:
        dist.destroy_process_group()


def run(options: argparse.Namespace, device: torch.device) -> list[dict]:
    """The rows of all mixes, the same in every process. It ends after a wait that ran out, which leaves no arena."""
    group, bank, rows = dist.group.WORLD, Bank(device), []
    cases = [mix(seed, ranks=(dist.get_world_size() * options.virtual,)) for seed in range(options.mixes)]
    arenas = Arenas(group, options.virtual, cases)
    end = time.monotonic() + options.seconds
    for case in cases:
        late = torch.tensor([float(time.monotonic() > end)], device=device)
        dist.all_reduce(late)
        if late.item():
            break
        rows.append(row_of(case, bank, group=group, make_domain=arenas.get, timeout_s=options.wait_seconds))
        if "output" not in rows[-1]:
            break
    return rows


class Arenas:
    """One arena per number and size of KV heads, large enough for every case, so that mixes of all kinds share them."""

    def __init__(self, group: dist.ProcessGroup, virtual: int, cases: Sequence[Case]):
        self._group, self._virtual = group, virtual
        self._tiles: dict[tuple[int, int], int] = {}
        self._made: dict[tuple[int, int], Domain] = {}
        for case in cases:
            key = case.kv_heads, case.head_dim
            shards = Placement.from_groups(case.lengths, case.ranks, case.groups).shards(0)
            self._tiles[key] = max(self._tiles.get(key, 0), arena_tiles(shards, case.causal))

    def get(self, ranks: int, layout: ArenaLayout, device: torch.device) -> Domain:
        """The arena for calls that need ``layout``; made at its first use, by all processes together."""
        key = layout.kv_heads, layout.head_dim
        if key not in self._made:
            largest = ArenaLayout(self._tiles[key], *key)
            self._made[key] = SymmetricDomain(self._group, largest, device, ranks_per_process=self._virtual)
        return self._made[key]


def _write(options: argparse.Namespace, rows: list[dict]) -> None:
    options.out.parent.mkdir(parents=True, exist_ok=True)
    record = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(sys.argv),
        "gpus": [torch.cuda.get_device_name(i) for i in range(dist.get_world_size())],
        "torch": torch.__version__,
        "ranks_per_gpu": options.virtual,
        "rows": rows,
    }
    options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
