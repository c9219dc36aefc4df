"""The parts of a decoder that no attention layout moves, as far as their memory and arithmetic go. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self


@dataclass(frozen=True)
class FeedForward:
    """Gated MLPs, experts, embedding and output layer. Over T ranks all of them are cut T ways; experts whole.

    ``dense_layers`` of the layers have an MLP of ``ffn_hidden``; the others have ``experts`` of ``expert_hidden``, of
    which a token visits ``topk``, and a shared one of ``shared_hidden`` (0 for none). ``gated`` MLPs have three
    matrices, others two. ``vocab`` is 0 where it is not known.
    """

    ffn_hidden: int
    dense_layers: int
    experts: int = 0
    topk: int = 0
    expert_hidden: int = 0
    shared_hidden: int = 0
    gated: bool = True
    vocab: int = 0
    tied: bool = False

    @classmethod
    def from_config(cls, config: Any) -> Self:
        """Build from Megatron's option or config names; what they do not say counts as absent."""
        layers = config.num_layers
        experts = getattr(config, "num_moe_experts", None) or getattr(config, "num_experts", None) or 0
        ffn = getattr(config, "ffn_hidden_size", None) or 4 * config.hidden_size
        return cls(
            ffn_hidden=ffn,
            dense_layers=layers - _moe_layers(getattr(config, "moe_layer_freq", 1), layers) if experts else layers,
            experts=experts,
            topk=getattr(config, "moe_router_topk", 0) if experts else 0,
            expert_hidden=(getattr(config, "moe_ffn_hidden_size", None) or ffn) if experts else 0,
            shared_hidden=(getattr(config, "moe_shared_expert_intermediate_size", None) or 0) if experts else 0,
            gated=getattr(config, "gated_linear_unit", True),
            vocab=getattr(config, "vocab_size", None) or 0,
            tied=not getattr(config, "untie_embeddings_and_output_weights", True),
        )

    def stored(self, hidden: int, layers: int) -> int:
        """Parameters of the whole model outside attention, norms excepted."""
        matrices = 3 if self.gated else 2
        moe = layers - self.dense_layers
        made = self.dense_layers * matrices * hidden * self.ffn_hidden
        made += moe * hidden * (matrices * (self.experts * self.expert_hidden + self.shared_hidden) + self.experts)
        return made + self.vocab * hidden * (1 if self.tied else 2)

    def visited(self, hidden: int, layers: int) -> int:
        """Parameters that one token meets on its way to its logits."""
        matrices = 3 if self.gated else 2
        moe = layers - self.dense_layers
        made = self.dense_layers * matrices * hidden * self.ffn_hidden
        made += moe * hidden * (matrices * (self.topk * self.expert_hidden + self.shared_hidden) + self.experts)
        return made + self.vocab * hidden

    def read(self, hidden: int, layers: int, rows: int) -> float:
        """Parameters that a step of ``rows`` rows reads: of the experts, those that it is expected to visit."""
        matrices = 3 if self.gated else 2
        unread = self.experts * (1 - self.topk / self.experts) ** rows if self.experts else 0.0
        skipped = (layers - self.dense_layers) * matrices * hidden * self.expert_hidden * unread
        embedding = 0 if self.tied else self.vocab * hidden  # a row per token of it, which is nothing
        return self.stored(hidden, layers) - skipped - embedding


def _moe_layers(frequency: int | Sequence[int], layers: int) -> int:
    """How many layers have experts, from ``moe_layer_freq``: every N-th, or one flag per layer."""
    if isinstance(frequency, int):
        return -(-layers // frequency)
    if len(frequency) != layers:
        raise ValueError(f"moe_layer_freq has {len(frequency)} entries for {layers} layers; give one per layer")
    return sum(bool(flag) for flag in frequency)
