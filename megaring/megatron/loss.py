"""The loss: a sum over the target tokens, of rows that are chosen before anything is computed from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region, vocab_parallel_cross_entropy

from megaring.data.microbatch import Microbatch


@dataclass(frozen=True, eq=False)
class Targets:
    """The rows of a microbatch that count: ``rows [n]`` int64, their indices, and ``labels [n]`` int64, on the device
    of the model.
    """

    rows: torch.Tensor
    labels: torch.Tensor

    @classmethod
    def of(cls, batch: Microbatch, device: torch.device | str) -> Targets:
        """The targets of ``batch``; does not wait for the GPU when the batch is still in host memory."""
        rows = torch.nonzero(batch.loss_mask[0]).squeeze(1)
        labels = batch.labels[0].index_select(0, rows)
        return cls(rows.to(device, non_blocking=True), labels.to(device, non_blocking=True))


def target_losses(
    *, hidden_states: torch.Tensor, output_layer: Any, output_weight: Any, context: Targets, **_: Any
) -> torch.Tensor:
    """Cross-entropy ``[n]`` fp32 of the rows that count; an ``output_processor`` of ``GPTModel``.

    Only these rows reach the output layer. So a row that does not count reaches neither the loss nor a gradient,
    whatever it holds (0 x NaN is NaN: masking afterwards would not do), and costs no logits. With no rows, the result
    is empty but still depends on the weights, whose gradients come out zero.
    """
    group = output_layer.tp_group
    if group.size() > 1:  # [rows / TP, 1, h] -> [rows, 1, h]; its backward sums over the parts of the vocabulary
        hidden_states = gather_from_sequence_parallel_region(
            hidden_states, tensor_parallel_output_grad=True, group=group
        )
    chosen = hidden_states.index_select(0, context.rows)
    logits, _bias = output_layer(chosen, weight=output_weight)
    return vocab_parallel_cross_entropy(logits, context.labels.unsqueeze(1), tp_group=group).squeeze(1)


def sum_losses(losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What the pipeline schedule wants of a microbatch: sum to differentiate, number of targets, sum to report."""
    total = losses.sum()
    return total, torch.full((), losses.numel(), dtype=torch.int, device=losses.device), total.detach()


def unwrap(chunk: torch.nn.Module) -> GPTModel:
    """The model inside its wrappers for data parallelism and mixed precision."""
    while not isinstance(chunk, GPTModel):
        chunk = chunk.module
    return chunk
