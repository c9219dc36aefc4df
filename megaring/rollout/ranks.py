"""The collectives of a worker's group, with sizes that every rank knows from the plan. One rank needs no group."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, Self

import torch
import torch.distributed as dist


class PeerLost(RuntimeError):
    """A collective failed: a peer has died or is late. The group is of no more use; end this process."""


class Ranks:
    """T ranks that serve one model. Every wait ends with the timeout of the process group.

    ``transfers`` is a second communicator over the same ranks, so that a layer in transit never waits for, or gets into
    the way of, the collectives of the step.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, transfers: dist.ProcessGroup | None, device: torch.device
    ) -> None:
        self.group, self.transfers, self._device = group, transfers, device
        self.rank = dist.get_rank(group) if group is not None else 0
        self.size = dist.get_world_size(group) if group is not None else 1

    @classmethod
    def single(cls) -> Self:
        """One process on its own."""
        return cls(None, None, torch.device("cpu"))

    @classmethod
    def over(cls, group: dist.ProcessGroup, timeout: timedelta, device: torch.device | str = "cpu") -> Self:
        """The ranks of ``group``; collective over them, since it makes the second communicator. ``device``: where the
        group's backend wants its tensors.
        """
        ranks = dist.get_process_group_ranks(group)
        return cls(group, dist.new_group(ranks, timeout=timeout, use_local_synchronization=True), torch.device(device))

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks, in place; the bits are the same on all of them."""
        if self.size > 1:
            with self._named("an all-reduce"):
                dist.all_reduce(tensor, group=self.group)
        return tensor

    def gather_rows(self, part: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """Concatenate every rank's rows, of which rank r has ``counts[r]``: ``[sum(counts), ...]``.

        Shorter parts travel padded to the longest, as gloo gathers equal parts only.
        """
        if self.size == 1:
            return part
        longest = max(counts)
        sent = part.new_zeros((longest, *part.shape[1:]))
        sent[: len(part)] = part
        parts = [torch.empty_like(sent) for _ in counts]
        with self._named("an all-gather"):
            dist.all_gather(parts, sent, group=self.group)
        return torch.cat([each[:count] for each, count in zip(parts, counts, strict=True)])

    def gather_columns(self, part: torch.Tensor) -> torch.Tensor:
        """Concatenate equal parts of every rank along the last dimension."""
        if self.size == 1:
            return part
        parts = [torch.empty_like(part) for _ in range(self.size)]
        with self._named("an all-gather"):
            dist.all_gather(parts, part.contiguous(), group=self.group)
        return torch.cat(parts, dim=-1)

    def exchange(self, sent: Sequence[torch.Tensor], receive_counts: Sequence[int]) -> list[torch.Tensor]:
        """All-to-all of flat tensors: ``sent[r]`` goes to rank r, ``receive_counts[r]`` elements come from it.

        Empty ones take part as well.
        """
        if self.size == 1:
            return [sent[0].reshape(-1)]
        packed, received = self._buffers(sent, receive_counts)
        with self._named("an all-to-all"):
            dist.all_to_all_single(
                received, packed, list(receive_counts), [each.numel() for each in sent], group=self.group
            )
        return list(received.split(list(receive_counts)))

    def start_exchange(self, sent: Sequence[torch.Tensor], receive_counts: Sequence[int]) -> Transit:
        """``exchange`` on the communicator for transfers, under way when this returns."""
        if self.size == 1:
            return Transit(self, None, sent[0].reshape(-1), sent[0], list(receive_counts))
        packed, received = self._buffers(sent, receive_counts)
        with self._named("a transfer"):
            work = dist.all_to_all_single(
                received,
                packed,
                list(receive_counts),
                [each.numel() for each in sent],
                group=self.transfers,
                async_op=True,
            )
        return Transit(self, work, received, packed, list(receive_counts))

    def check_equal(self, text: str, what: str) -> None:
        """Raise RuntimeError on every rank unless all of them pass the same ``text``."""
        if self.size == 1:
            return
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        mine = torch.tensor([int.from_bytes(digest, "little", signed=True)], device=self._device)
        seen = self.gather_rows(mine, [1] * self.size).tolist()
        if len(set(seen)) > 1:
            differing = [rank for rank, value in enumerate(seen) if value != seen[0]]
            raise RuntimeError(f"ranks disagree about {what}: {differing} differ from rank 0; nothing was moved")

    def broadcast(self, value: Any) -> Any:
        """Rank 0's object on every rank."""
        if self.size == 1:
            return value
        box = [value]
        with self._named("a broadcast"):
            dist.broadcast_object_list(box, src=dist.get_global_rank(self.group, 0), group=self.group)
        return box[0]

    def _buffers(
        self, sent: Sequence[torch.Tensor], receive_counts: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        packed = torch.cat([each.reshape(-1) for each in sent])
        return packed, packed.new_empty(sum(receive_counts))

    @contextlib.contextmanager
    def _named(self, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            reason = str(error).splitlines()[0][:200]
            raise PeerLost(
                f"rank {self.rank} of {self.size}: {what} failed, a peer has died or is late ({reason}); "
                "see the rank that failed first"
            ) from error


class Transit:
    """An exchange under way; it keeps its buffers alive."""

    def __init__(self, ranks: Ranks, work: Any, received: torch.Tensor, sent: torch.Tensor, counts: list[int]) -> None:
        self._ranks, self._work, self._received, self._sent, self._counts = ranks, work, received, sent, counts

    def wait(self) -> list[torch.Tensor]:
        """What came from each rank, when all of it has."""
        if self._work is not None:
            with self._ranks._named("a transfer"):
                self._work.wait()
        return list(self._received.split(self._counts))
