"""A case's calls of the forward kernel, in poisoned memory: NaN wherever nothing valid is to be read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from buddyring.placement import Placement
from buddyring.shards import Shards
from megaring.kernels.arena import ArenaLayout, Domain, LocalDomain
from megaring.kernels.forward_plan import plan_forward
from megaring.kernels.megaring_forward import RankCall, megaring_forward, to_device

MakeDomain = Callable[[int, ArenaLayout, torch.device], Domain]


@dataclass(frozen=True, eq=False)
class Calls:
    """One launch's calls: those of the ranks that live here, with their shards and their tokens' numbers."""

    domain: Domain
    calls: list[RankCall]
    shards: list[Shards]
    tokens: list[torch.Tensor]
    scale: float

    def run(self, **options) -> None:
        """Launch on the current stream, wait, and raise PeerTimeout when it had to stop."""
        self.launch(**options)
        torch.cuda.synchronize()
        self.domain.check()

    def launch(self, **options) -> None:
        """Launch on the current stream; ``options`` are those of ``megaring_forward``."""
        megaring_forward(self.domain, self.calls, softmax_scale=self.scale, **options)

    def poison(self) -> None:
        """NaN in all outputs."""
        for call in self.calls:
            call.out.fill_(float("nan"))
            call.lse.fill_(float("nan"))

    def outputs(self) -> list[torch.Tensor]:
        """Copies of output and LSE of every call, in turn."""
        return [tensor.clone() for call in self.calls for tensor in (call.out, call.lse)]

    def differing(self, others: list[torch.Tensor]) -> int:
        """How many outputs and LSEs are not bit-equal to ``others``, NaN being equal to nothing."""
        found = [tensor for call in self.calls for tensor in (call.out, call.lse)]
        return sum(not torch.equal(ours, theirs) for ours, theirs in zip(found, others, strict=True))

    def dirty(self) -> bool:
        """Whether a row of no sequence is anything but cleared."""
        rows = [len(tokens) for tokens in self.tokens]
        return any(
            bool((call.out[first:] != 0).any() or (call.lse[first:] != float("-inf")).any())
            for call, first in zip(self.calls, rows, strict=True)
        )

    def pieces(self) -> Iterator[tuple[int, torch.Tensor, torch.Tensor, torch.Tensor]]:
        """(sequence, positions in it, output rows, LSE rows) of every sequence that each call holds part of."""
        for call, shards in zip(self.calls, self.shards, strict=True):
            positions = torch.from_numpy(shards.positions.astype("int64")).to(call.out.device)
            for held, sequence in enumerate(shards.sequences.tolist()):
                rows = slice(*shards.cu_seqlens[held : held + 2].tolist())
                yield sequence, positions[rows], call.out[rows], call.lse[rows]


def prepare(
    placement: Placement,
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    *,
    causal: bool = True,
    strided: bool = False,
    make_domain: MakeDomain = LocalDomain,
) -> Calls:
    """Calls of the ranks of ``placement`` that live here, on copies of their rows of ``tensors``.

    tensors: q ``[T, Hq, D]`` and k, v ``[T, Hkv, D]`` of all sequences, in input order. strided: whether a rank's q, k
    and v are views into one tensor. make_domain: from the number of ranks, the least layout and the device.
    """
    device, (kv_heads, head_dim) = tensors[0].device, tensors[1].shape[1:]
    plans = [plan_forward(placement.shards(rank), causal=causal) for rank in range(placement.ranks)]
    layout = ArenaLayout(max(plan.arena_tiles for plan in plans), kv_heads, head_dim)
    domain = make_domain(placement.ranks, layout, device)
    calls, shards, tokens = [], [placement.shards(rank) for rank in domain.local], []
    data = slice(domain.layout.data_offset, domain.layout.counts_offset)
    for rank, held in zip(domain.local, shards, strict=True):
        domain.arenas[rank][data] = 0xFF  # NaN in both types
        index = torch.from_numpy(held.tokens.copy()).to(device)
        parts = packed([tensor[index] for tensor in tensors], plans[rank].rows, strided)
        out = torch.empty(parts[0].shape, dtype=parts[0].dtype, device=device)
        calls.append(RankCall(to_device(plans[rank], device), *parts, out, out.new_empty(out.shape[:2]).float()))
        tokens.append(index)
    made = Calls(domain, calls, shards, tokens, head_dim**-0.5)
    made.poison()
    return made


def packed(parts: list[torch.Tensor], rows: int, strided: bool) -> list[torch.Tensor]:
    """Local tensors with ``rows`` rows, NaN wherever no token is; as views into one tensor if ``strided``."""
    heads = [part.shape[1] for part in parts]
    if strided:
        whole = parts[0].new_full((rows, sum(heads), parts[0].shape[2]), float("nan"))
        made = list(whole.split(heads, dim=1))
    else:
        made = [part.new_full((rows, *part.shape[1:]), float("nan")) for part in parts]
    for target, part in zip(made, parts, strict=True):
        target[: len(part)] = part
    return made
