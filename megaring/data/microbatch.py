"""What one rank feeds the model for one microbatch: tensors in the packed order of its shards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch

from buddyring import Placement, Shards


@dataclass(frozen=True, eq=False)
class Microbatch:
    """One rank's part of one plan. Build it with ``build_microbatch``.

    Tensors have shape ``[1, rows]`` with ``rows = shards.rows``. Rows past ``shards.num_tokens`` are dummies: token 0,
    label 0, loss mask 0, position 0, padding True.
    tokens: int64 ids. labels: int64, the next token of the same sequence; 0, a valid id, where there is none, so that
    cross-entropy can run on every row: ``loss_mask`` alone says which rows count.
    loss_mask: float32, 1 where the label is a target. position_ids: int64, position inside the sequence.
    padding_mask: bool, True on dummies; None on a rank without dummies.
    The counts are of the whole microbatch, equal on every rank of the domain:
    num_tokens: tokens of all sequences. target_tokens: rows whose label is a target. sum_squared_lengths: sum of
    ``L^2`` over the sequences, for attention FLOPs. samples: the data set's number of each sequence, in the
    placement's order.
    """

    placement: Placement
    shards: Shards
    tokens: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    position_ids: torch.Tensor
    padding_mask: torch.Tensor | None
    num_tokens: int
    target_tokens: int
    sum_squared_lengths: int
    samples: tuple[int, ...] = ()

    def to(self, device: torch.device | str) -> Microbatch:
        """The same microbatch with its tensors on ``device``; the copy is asynchronous from pinned memory."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> Microbatch:
        """The same microbatch in page-locked memory (needs a GPU)."""
        return self._map(torch.Tensor.pin_memory)

    def _map(self, change) -> Microbatch:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{k: change(v) for k, v in values.items() if isinstance(v, torch.Tensor)})


def build_microbatch(
    placement: Placement,
    rank: int,
    sequences: Sequence[np.ndarray],
    *,
    targets: Sequence[np.ndarray] | None = None,
    samples: Sequence[int] = (),
) -> Microbatch:
    """What ``rank`` holds of ``sequences`` under ``placement``.

    sequences: the placement's sequences in its order, each ``[L]`` integers; only the rank's own chunks and the one
    token after each are read, so memory-mapped arrays stay unread elsewhere.
    targets: per sequence ``[L]`` booleans, whether token ``j`` is to be predicted (from token ``j - 1``; the first
    one never is); all of them by default. Labels are shifted inside the whole sequence, before it is split.
    Raises ValueError when a sequence or its targets have not the length that was planned.
    """
    shards = placement.shards(rank)
    _check_lengths("sequences", sequences, placement.lengths)
    if targets is not None:
        _check_lengths("targets", targets, placement.lengths)
    tokens, labels, positions = (np.zeros(shards.rows, dtype=np.int64) for _ in range(3))
    loss_mask = np.zeros(shards.rows, dtype=np.float32)
    positions[: shards.num_tokens] = shards.positions
    row = 0
    for index, chunks in zip(shards.sequences.tolist(), shards.chunks.tolist(), strict=True):
        sequence, length = sequences[index], placement.lengths[index]
        for first, last in chunks:
            tokens[row : row + last - first] = sequence[first:last]
            known = min(last + 1, length) - (first + 1)  # the sequence's last token has no next one
            if known > 0:
                labels[row : row + known] = sequence[first + 1 : last + 1]
                loss_mask[row : row + known] = 1 if targets is None else targets[index][first + 1 : last + 1]
            row += last - first
    if targets is not None:
        labels[loss_mask == 0] = 0
        target_tokens = sum(int(np.count_nonzero(target[1:])) for target in targets)
    else:
        target_tokens = sum(placement.lengths) - len(placement.lengths)
    has_dummies = shards.rows > shards.num_tokens
    return Microbatch(
        placement=placement,
        shards=shards,
        tokens=torch.from_numpy(tokens)[None],
        labels=torch.from_numpy(labels)[None],
        loss_mask=torch.from_numpy(loss_mask)[None],
        position_ids=torch.from_numpy(positions)[None],
        padding_mask=(torch.arange(shards.rows) >= shards.num_tokens)[None] if has_dummies else None,
        num_tokens=sum(placement.lengths),
        target_tokens=target_tokens,
        sum_squared_lengths=sum(length * length for length in placement.lengths),
        samples=tuple(samples),
    )


def _check_lengths(name: str, arrays: Sequence[np.ndarray], lengths: tuple[int, ...]) -> None:
    if len(arrays) != len(lengths):
        raise ValueError(f"{len(arrays)} {name} for a placement of {len(lengths)} sequences")
    for index, (array, length) in enumerate(zip(arrays, lengths, strict=True)):
        if len(array) != length:
            raise ValueError(f"{name}[{index}] has {len(array)} tokens but was planned with {length}")
