"""Experts in two grouped matrix products instead of a loop, without Transformer Engine."""

from __future__ import annotations

import torch
from megatron.core.transformer.moe.experts import SequentialMLP
from torch.nn import functional

ALIGNMENT = 8  # rows: 16 bytes of bf16, which torch's kernel for the weights' gradient wants of every expert's rows


class GroupedExperts(SequentialMLP):
    """Megatron's sequential experts with another forward pass: same parameters, names and checkpoints.

    A loop over experts launches three small products for each one; with dozens of experts a GPU spends its time on the
    launches. Here the experts' weights are stacked (one copy per layer and pass) for ``torch``'s grouped product, which
    on a GPU of compute capability 9.0 is one kernel for bf16; elsewhere torch loops. Rows of the weights must be
    multiples of 16 bytes. SwiGLU without biases only. Run on CPUs so far.
    """

    def forward(
        self, hidden: torch.Tensor, tokens_per_expert: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """hidden: ``[n, hidden_size]``, rows grouped by local expert, ``tokens_per_expert[i]`` of them for expert
        ``i``. probs: ``[n]``, weight of each row's expert. Returns ``[n, hidden_size]`` and no bias.
        """
        if len(hidden) == 0:
            return super().forward(hidden, tokens_per_expert, probs)
        rows, ends, total = _aligned_rows(tokens_per_expert.cpu(), hidden.device)
        # Rows between the experts' own are zero: they give zero, and no gradient.
        spread = hidden.new_zeros(total, hidden.shape[1]).index_copy(0, rows, hidden)
        gate_up = torch.stack([expert.linear_fc1.weight for expert in self.local_experts])
        down = torch.stack([expert.linear_fc2.weight for expert in self.local_experts])
        gate, up = functional.grouped_mm(spread, gate_up.transpose(1, 2), offs=ends).chunk(2, dim=-1)
        weights = probs.new_zeros(total).index_copy(0, rows, probs)
        active = (functional.silu(gate) * up * weights.unsqueeze(-1)).to(hidden.dtype)
        return functional.grouped_mm(active, down.transpose(1, 2), offs=ends).index_select(0, rows), None


def _aligned_rows(counts: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Every expert's rows begin at a multiple of ``ALIGNMENT``: where each packed row goes, ``[n]`` int64; the experts'
    past-the-end rows, ``[experts]`` int32; all rows. counts: ``[experts]`` in host memory.
    """
    padded = (counts + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    ends = padded.cumsum(0)
    shifts = (ends - padded) - (counts.cumsum(0) - counts)
    rows = torch.arange(int(counts.sum())) + torch.repeat_interleave(shifts, counts)
    return rows.to(device, non_blocking=True), ends.to(device, torch.int32, non_blocking=True), int(ends[-1])
