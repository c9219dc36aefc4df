"""The arena over several processes of one node, one GPU each, through torch's symmetric memory.

Every process allocates one block and all exchange it in one rendezvous on the whole group. Torch's own signal pads
collide when groups overlap, so they are not used: every flag is a word of the arena.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
from torch.distributed import _symmetric_memory as symmetric_memory

from megaring.errors import UserError
from megaring.kernels.arena import ArenaLayout, Domain


@dataclass(frozen=True)
class Seat:
    """Where a process of a group runs: its host and its GPU's identity."""

    host: str
    gpu: str


class SymmetricDomain(Domain):
    """Ranks ``[i * n, (i + 1) * n)`` live in process ``i`` of ``group``, which carries ``n = ranks_per_process``.

    Building one is collective: every process of the group makes the same call at the same place in its sequence of
    collectives, and never while a CUDA graph is captured. Waits are bounded by the group's timeout. The layout cannot
    change afterwards; a larger arena is another domain. Raises UserError, in all processes alike, when they ask for
    different arenas, and when they don't run on different GPUs of one host.
    """

    def __init__(
        self, group: dist.ProcessGroup, layout: ArenaLayout, device: torch.device, *, ranks_per_process: int = 1
    ):
        processes, process = dist.get_world_size(group), dist.get_rank(group)
        agree(group, device, {**asdict(layout), "ranks_per_process": ranks_per_process})
        # NVLink multicast is not needed, and a rendezvous would claim some of the little there is.
        os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
        with torch.cuda.device(device):
            self._memory = symmetric_memory.empty(layout.bytes * ranks_per_process, dtype=torch.uint8, device=device)
            self._memory.zero_()
            self._handle = symmetric_memory.rendezvous(self._memory, group)
            arenas = [
                self._handle.get_buffer(owner, (layout.bytes,), torch.uint8, slot * layout.bytes)
                for owner in range(processes)
                for slot in range(ranks_per_process)
            ]
            barrier(group, device)  # nobody writes into an arena before its owner has zeroed it
        super().__init__(arenas, range(process * ranks_per_process, (process + 1) * ranks_per_process), layout, device)


def seats_refusal(seats: Sequence[Seat]) -> str | None:
    """Why processes in these seats cannot share an arena, or None."""
    hosts = sorted({seat.host for seat in seats})
    if len(hosts) > 1:
        return f"its ranks are on {len(hosts)} hosts ({', '.join(hosts[:4])}), and the kernel reaches GPUs of one only"
    if len({seat.gpu for seat in seats}) < len(seats):
        return "several of its ranks use the same GPU; give each process its own (torch.cuda.set_device)"
    return None


def gather_seats(group: dist.ProcessGroup, device: torch.device) -> list[Seat]:
    """The seats of all processes of ``group``, by rank. Collective."""
    return [Seat(*each) for each in _gather(group, device, (socket.gethostname(), gpu_name(device)))]


def agree(group: dist.ProcessGroup, device: torch.device, wanted: dict[str, int]) -> None:
    """Raise UserError in every process unless all want the same arena. Collective."""
    asked = _gather(group, device, wanted)
    for rank, other in enumerate(asked):
        if other != asked[0]:
            raise UserError(
                f"ranks 0 and {rank} of the group want different arenas ({asked[0]} and {other}): they attend to "
                "different steps; give all ranks the same placement"
            )


def barrier(group: dist.ProcessGroup, device: torch.device) -> None:
    """Wait until every process of the group has come here and its GPU has done all that was queued before."""
    torch.cuda.synchronize(device)
    _gather(group, device, None)


def gpu_name(device: torch.device) -> str:
    """The GPU's identity, the same whatever CUDA_VISIBLE_DEVICES says."""
    return str(torch.cuda.get_device_properties(device).uuid)


def _gather(group: dist.ProcessGroup, device: torch.device, value: object) -> list:
    with torch.cuda.device(device):  # where NCCL puts the pickled objects
        found: list = [None] * dist.get_world_size(group)
        dist.all_gather_object(found, value, group=group)
    return found
