"""Sums over blocks of keys: partial softmax outputs, and partial gradients, in fp32 (fp64 for fp64)."""

from __future__ import annotations

import torch

from megaring.backends.precision import wide
from megaring.backends.ring_plan import Part, RingPlan


class Rows:
    """The split rows of a tensor, and lazily its half of them (fronts or backs) gathered into a prefix order."""

    def __init__(self, tensor: torch.Tensor, plan: RingPlan, half: torch.Tensor) -> None:
        self._whole = tensor[: plan.split_rows]
        self._index = half
        self._half: torch.Tensor | None = None

    def __getitem__(self, part: Part) -> torch.Tensor:
        if not part.half:
            return self._whole[: part.rows]
        if self._half is None:
            self._half = self._whole.index_select(0, self._index)
        return self._half[: part.rows]


class Sum:
    """A gradient of the split rows, summed over blocks; ``half`` says which rows ``Part(half=True)`` means."""

    def __init__(self, first: torch.Tensor, plan: RingPlan, half: torch.Tensor) -> None:
        self._whole = first[: plan.split_rows].to(wide(first.dtype), copy=True)
        self._index = half
        self._half: torch.Tensor | None = None

    def add(self, value: torch.Tensor, part: Part) -> None:
        """Add a block's gradient for ``part``."""
        if part.half and self._half is None:
            self._half = self._whole.new_zeros((len(self._index), *self._whole.shape[1:]))
        (self._half if part.half else self._whole)[: part.rows] += value

    def result(self) -> torch.Tensor:
        """The sum, ``[split_rows, ...]``."""
        if self._half is not None:
            self._whole.index_add_(0, self._index, self._half)
        return self._whole


class Softmax:
    """Output and LSE of the split rows, merged over blocks of keys.

    Two blocks with (O1, LSE1) and (O2, LSE2) have LSE = log(exp LSE1 + exp LSE2) and
    O = O1 + (O2 - O1) * exp(LSE2 - LSE) (LiquidCP, section 3). Both are evaluated with the maximum subtracted, so that
    nothing overflows; -inf, no key at all, is a neutral element.
    """

    def __init__(self, out: torch.Tensor, lse: torch.Tensor, plan: RingPlan) -> None:
        self._out = out[: plan.split_rows].to(wide(out.dtype), copy=True)
        self._lse = lse[: plan.split_rows].clone()
        self._index = plan.backs
        self._half: tuple[torch.Tensor, torch.Tensor] | None = None

    def merge(self, out: torch.Tensor, lse: torch.Tensor, part: Part) -> None:
        """Merge a block's output ``[rows, Hq, D]`` and LSE ``[rows, Hq]`` for ``part``."""
        if part.half and self._half is None:
            rows = len(self._index)
            self._half = (
                self._out.new_zeros((rows, *self._out.shape[1:])),
                self._lse.new_full((rows, *self._lse.shape[1:]), float("-inf")),
            )
        whole_out, whole_lse = self._half if part.half else (self._out, self._lse)
        merge_into(whole_out[: part.rows], whole_lse[: part.rows], out, lse)

    def result(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Merged output and LSE of the split rows."""
        if self._half is not None:
            out, lse = self._out[self._index], self._lse[self._index]
            merge_into(out, lse, *self._half)
            self._out[self._index], self._lse[self._index] = out, lse
        return self._out, self._lse


def merge_into(out: torch.Tensor, lse: torch.Tensor, other_out: torch.Tensor, other_lse: torch.Tensor) -> None:
    """Merge another block into ``out [n, Hq, D]`` and ``lse [n, Hq]`` in place; see ``Softmax``."""
    weight = torch.sigmoid(other_lse - lse)  # exp(LSE2 - LSE), without its cancellation
    weight.masked_fill_(other_lse == float("-inf"), 0.0)
    out.lerp_(other_out.to(out.dtype), weight[..., None])
    torch.logaddexp(lse, other_lse, out=lse)
