"""The router of the expert layers, with balancing losses that do not depend on where tokens lie.

Both losses are sums over the real tokens of the rank domain, so a domain gives the gradients that one process with the
same sequences gives. Megatron's own balancing loss takes the count of tokens as local rows x ranks, which is wrong
when ranks hold different numbers of rows; with a padding mask it also reduces the local counts in place, and its
gradient comes out multiplied by the number of ranks. Its z-loss is right with a padding mask, but what it logs is a
mean of local means.

Megatron's scale is kept: each microbatch's balancing loss is weighted by its real tokens, and everything is divided by
the step's target tokens at the end (``calculate_per_token_loss``).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler, switch_load_balancing_loss_func
from megatron.core.transformer.moe.router import TopKRouter


class DomainRouter(TopKRouter):
    """Put it in the ``router`` of an expert layer's ``MoESubmodules``.

    ``take_sums()`` returns what this rank has gathered for the log since the last call.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._sums: torch.Tensor | None = None

    def take_sums(self) -> torch.Tensor:
        """``[2]`` float64, this rank's share of: balancing loss (without its coefficient) x tokens of its microbatch,
        squared log-sum-exp of every real token; both summed over microbatches. Starts again from zero.
        """
        sums, self._sums = self._sums, None
        return torch.zeros(2, dtype=torch.float64, device=self.weight.device) if sums is None else sums

    def _note(self, index: int, value: torch.Tensor) -> None:
        if self._sums is None:
            self._sums = torch.zeros(2, dtype=torch.float64, device=value.device)
        self._sums[index] += value.detach()

    def _apply_aux_loss(
        self,
        probs: torch.Tensor,
        scores_for_aux_loss: torch.Tensor,
        routing_map: torch.Tensor,
        with_padding_mask: bool = False,
    ) -> torch.Tensor:
        """Attach the balancing loss of the Switch Transformer (https://arxiv.org/abs/2101.03961, section 2.2).

        scores_for_aux_loss, routing_map: ``[rows, experts]``, both already zero on padding. With counts and number of
        tokens taken over the domain, the loss is linear in the local scores: ranks add up to the domain's loss.
        """
        coeff = self.get_aux_loss_coeff("aux_loss")
        if coeff == 0:
            return probs
        per_expert = routing_map.sum(dim=0)
        if self.tp_cp_group.size() > 1:
            dist.all_reduce(per_expert, group=self.tp_cp_group)
        tokens = per_expert.sum() / self.topk
        loss = switch_load_balancing_loss_func(
            probs=scores_for_aux_loss,
            tokens_per_expert=per_expert,
            total_num_tokens=tokens.clamp(min=1),
            topk=self.topk,
            num_experts=self.config.num_moe_experts,
            moe_aux_loss_coeff=coeff,
            fused=self.config.moe_router_fusion,
        )
        self._note(0, loss * tokens / coeff)
        return MoEAuxLossAutoScaler.apply(probs, loss * tokens)

    def apply_z_loss(self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None) -> torch.Tensor:
        """Attach the router z-loss of ST-MoE (https://arxiv.org/abs/2202.08906, equation 5).

        logits: ``[rows, experts]``. padding_mask: ``[rows]``, true on rows that do not count.
        """
        coeff = self.config.moe_z_loss_coeff
        if coeff is None or not (self.training and torch.is_grad_enabled()):
            return logits
        squares = torch.logsumexp(logits, dim=-1).square()
        if padding_mask is not None:
            squares = squares.masked_fill(padding_mask, 0.0)
        loss = squares.sum()
        self._note(1, loss)
        return MoEAuxLossAutoScaler.apply(logits, loss * coeff)


def use_domain_router(mlp: Any) -> None:
    """Make the expert layer that ``mlp`` builds (a layer spec's ``mlp``) use ``DomainRouter``."""
    if not isinstance(mlp, functools.partial):
        raise TypeError(f"the spec of an expert layer is a functools.partial in megatron-core 0.19, not {type(mlp)}")
    mlp.keywords["submodules"].router = DomainRouter
