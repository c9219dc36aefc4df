"""Pairwise exchanges of packed rows over ``torch.distributed``, in flight while something else is computed."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

_warm: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()


@dataclass(frozen=True, eq=False)
class Exchange:
    """An exchange under way. It holds its buffers until ``wait``."""

    peer: int
    received: tuple[torch.Tensor, ...]
    sent: tuple[torch.Tensor, ...]
    works: tuple[dist.Work, ...]

    def wait(self) -> tuple[torch.Tensor, ...]:
        """What came from the peer. On a GPU the current stream waits, not the host; on a CPU the group's timeout
        bounds it.

        Raises RuntimeError when the peer does not answer in time or has left.
        """
        try:
            for work in self.works:
                work.wait()
        except RuntimeError as error:
            raise RuntimeError(
                f"the attention exchange with rank {self.peer} of the domain failed; that rank stopped, or did not "
                f"make the same attention call within the process group's timeout: {error}"
            ) from error
        return self.received


def start_exchange(group: dist.ProcessGroup, peer: int, sent: Sequence[torch.Tensor], received_rows: int) -> Exchange:
    """Send every tensor of ``sent`` to ``peer``, a rank of ``group``, and receive as many of the same kind.

    sent: tensors ``[n, ...]`` of any strides. received_rows: rows of each tensor that comes back, at least 1, as ``n``
    must be: both sides leave out an empty exchange, which they know from the placement.
    """
    global_peer = dist.get_global_rank(group, peer)
    outgoing = tuple(x.contiguous() for x in sent)
    incoming = tuple(x.new_empty((received_rows, *x.shape[1:])) for x in outgoing)
    operations = [dist.P2POp(dist.irecv, x, global_peer, group) for x in incoming]
    operations += [dist.P2POp(dist.isend, x, global_peer, group) for x in outgoing]
    return Exchange(peer, incoming, outgoing, tuple(dist.batch_isend_irecv(operations)))


def warm_up(group: dist.ProcessGroup, device: torch.device) -> None:
    """Connect all ranks of a group at its first use. All of them must call it.

    NCCL makes its communicator in the first operation, in which every rank has to take part; an exchange of some pairs
    alone would wait for ever.
    """
    if device.type == "cuda" and group not in _warm:
        dist.all_reduce(torch.zeros(1, device=device), group=group)
        _warm.add(group)
