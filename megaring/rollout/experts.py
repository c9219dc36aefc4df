"""This rank's experts of one layer as two grouped products without a host sync: for a GPU, and for CUDA graphs.

The experts' matrices are stacked once, and the model's parameters become views of the stacks, so that weights written
in place are in use at once. Every tensor has a size that depends on the number of rows alone.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional


class StackedExperts:
    """The experts ``first`` and up of a Megatron ``SequentialMLP``, whose parameters move into stacks.

    ``activation``: of the gate. Raises ValueError for experts that are not a list of gated MLPs without biases.
    """

    def __init__(self, experts: nn.Module, first: int, topk: int, activation: Callable) -> None:
        if not hasattr(experts, "local_experts"):
            raise ValueError(
                f"rollout on a GPU has experts in a list, but the model has {type(experts).__name__}; build it from "
                "the local spec"
            )
        self._modules, self._first, self._topk, self._activation = list(experts.local_experts), first, topk, activation
        self._gate_up = _stack([each.linear_fc1 for each in self._modules])  # [experts, 2 * ffn, hidden]
        self._down = _stack([each.linear_fc2 for each in self._modules])  # [experts, hidden, ffn]

    def check_adopted(self) -> None:
        """Raise RuntimeError where a parameter no longer lies in its stack."""
        for name, stack in (("linear_fc1", self._gate_up), ("linear_fc2", self._down)):
            step = stack[0].nbytes
            for place, module in enumerate(self._modules):
                if getattr(module, name).weight.data_ptr() != stack.data_ptr() + place * step:
                    raise RuntimeError(
                        f"{name} of expert {self._first + place} was replaced by another tensor; copy new weights into "
                        "the parameters"
                    )

    def __call__(self, rows: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """This rank's share of the output ``[n, hidden]`` for ``rows [n, hidden]``, of which each has exactly top-k
        experts: weights and chosen ``[n, experts]`` over all experts.
        """
        count, experts = len(rows), len(self._modules)
        picked, expert = weights.masked_fill(~chosen, -1.0).topk(self._topk, dim=1)
        local = expert - self._first
        # Visits to experts elsewhere come last, after all offsets: no product is made of them.
        local = torch.where((local >= 0) & (local < experts), local, experts).flatten()
        ordered, order = local.sort(stable=True)
        ends = torch.searchsorted(ordered, torch.arange(experts, device=rows.device), right=True).int()
        visitors = rows.index_select(0, order // self._topk)
        gate, up = functional.grouped_mm(visitors, self._gate_up.transpose(1, 2), offs=ends).chunk(2, dim=-1)
        share = picked.flatten().index_select(0, order).to(rows.dtype)
        active = (self._activation(gate) * up * share[:, None]).to(rows.dtype)
        found = functional.grouped_mm(active, self._down.transpose(1, 2), offs=ends)
        found = torch.where((ordered < experts)[:, None], found, 0.0)
        # Back in the order of rows, and summed in that of a row's experts: the bits do not depend on who is beside it.
        spread = torch.empty_like(found).index_copy_(0, order, found)
        return spread.view(count, self._topk, -1).sum(dim=1)


def _stack(modules: list[nn.Module]) -> torch.Tensor:
    """``[n, ...]`` of the modules' weights, which become views of it."""
    if any(getattr(module, "bias", None) is not None for module in modules):
        raise ValueError("rollout has experts without biases only")
    stack = torch.stack([module.weight.data for module in modules])
    for module, view in zip(modules, stack, strict=True):
        module.weight.data = view
    return stack
