"""Microbatches of one rank: drawn from the global order, planned from lengths alone, read where the rank needs them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

from buddyring import CapacityError, plan
from megaring.data.documents import Sequences, check_plannable
from megaring.data.indexed import CorpusError
from megaring.data.microbatch import Microbatch, build_microbatch
from megaring.data.prefetch import Prefetcher
from megaring.data.sampler import WINDOW, Sampler
from megaring.errors import UserError


@dataclass(frozen=True)
class LoaderConfig:
    """What microbatches are made of; everything but ``rank`` and ``replica`` must be the same in every process.

    token_budget: most tokens of a microbatch, over the whole domain. seed: of the training order.
    vocab_size: ids the model has. ranks, rank: size of the context-parallel domain, and this process's place in it.
    replicas, replica: how many domains train side by side (data parallelism above the domain), and which one this is.
    plan_options: keyword arguments of ``buddyring.plan`` (``scheduler``, ``capacity``, ``rank_multiple``, ...).
    window: most sequences left over by first-fit. prefetch: microbatches made ahead. pin_memory: for copies to a GPU.
    """

    token_budget: int
    seed: int
    vocab_size: int
    ranks: int = 1
    rank: int = 0
    replicas: int = 1
    replica: int = 0
    plan_options: Mapping[str, Any] | None = None
    window: int = WINDOW
    prefetch: int = 2
    pin_memory: bool = False

    def __post_init__(self):
        for name, place, size in (("rank", self.rank, self.ranks), ("replica", self.replica, self.replicas)):
            if not 0 <= place < size:
                raise ValueError(f"{name} {place} is not one of {size}")


class Loader:
    """An endless iterator of a rank's training microbatches, in a training order that is the same in every process.

    The global order is drawn in turn by the replicas: microbatch ``i`` of replica ``r`` is number ``i * replicas + r``.
    Microbatches are made ahead in a thread; its errors come out of ``next`` as they are. ``state()`` is the position
    after the last microbatch that ``next`` gave, whatever was made ahead; give it to a new loader to go on from there.
    Close it, or use it as a context manager.

    Raises CorpusError before the first microbatch for a sequence that the budget or the domain cannot hold and for a
    ``state`` of another order; from ``next``, CorpusError for a token id outside the vocabulary and UserError where no
    placement is found.
    """

    def __init__(self, sequences: Sequences, config: LoaderConfig, state: dict[str, Any] | None = None):
        sampler = Sampler(sequences, config.token_budget, config.seed, window=config.window)
        check_plannable(sequences, config.ranks, config.plan_options or {})
        if state is not None:
            sampler.restore(state)
        self._state = sampler.state()
        self._ahead = Prefetcher(_microbatches(sequences, config, sampler), config.prefetch)

    def __iter__(self) -> Iterator[Microbatch]:
        return self

    def __next__(self) -> Microbatch:
        microbatch, self._state = next(self._ahead)
        return microbatch

    def state(self) -> dict[str, Any]:
        """The position after the last microbatch given, for JSON; the same in every process of a step."""
        return self._state

    def close(self) -> None:
        """End the thread that works ahead."""
        self._ahead.close()

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class Evaluation:
    """A rank's microbatches of held-out sequences; every iteration gives the same ones and touches no training order.

    At most one epoch, at most ``max_microbatches`` per replica. ``len`` is known before and the same in every process:
    where the last round has too few sequences for all replicas, the others get a microbatch without sequences, so that
    all make the same collective calls. Raises as ``Loader`` does.
    """

    def __init__(self, sequences: Sequences, config: LoaderConfig, max_microbatches: int | None = None):
        self._sequences, self._config = sequences, config
        sampler = self._sampler()
        check_plannable(sequences, config.ranks, config.plan_options or {})
        rounds = islice(_rounds(sampler, config.replicas), max_microbatches)
        self._length = sum(1 for _ in rounds)

    def _sampler(self) -> Sampler:
        config = self._config
        return Sampler(self._sequences, config.token_budget, config.seed, window=config.window, epochs=1)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Microbatch]:
        made = islice(_microbatches(self._sequences, self._config, self._sampler()), self._length)
        with Prefetcher(made, self._config.prefetch) as ahead:
            for microbatch, _ in ahead:
                yield microbatch


def _rounds(sampler: Sampler, replicas: int) -> Iterator[list[list[int]]]:
    """The samples of one microbatch per replica, until the order ends."""
    while True:
        drawn = [sampler.draw() for _ in range(replicas)]
        if not drawn[0]:
            return
        yield drawn


def _microbatches(
    sequences: Sequences, config: LoaderConfig, sampler: Sampler
) -> Iterator[tuple[Microbatch, dict[str, Any]]]:
    """This rank's microbatches, each with the sampler's state after it."""
    for drawn in _rounds(sampler, config.replicas):
        microbatch = _make(sequences, config, drawn[config.replica])
        yield microbatch.pin_memory() if config.pin_memory else microbatch, sampler.state()


def _make(sequences: Sequences, config: LoaderConfig, samples: list[int]) -> Microbatch:
    lengths = sequences.lengths[samples]
    try:
        placement = plan(lengths, config.ranks, **(config.plan_options or {}))
    except CapacityError as error:
        raise UserError(
            f"a microbatch of {len(samples)} sequences and {int(lengths.sum()):,} tokens cannot be placed on "
            f"{config.ranks} ranks: {error}; raise --capacity or lower --token-budget"
        ) from error
    microbatch = build_microbatch(placement, config.rank, [sequences[s] for s in samples], samples=samples)
    _check_ids(microbatch, sequences, config.vocab_size)
    return microbatch


def _check_ids(microbatch: Microbatch, sequences: Sequences, vocab_size: int) -> None:
    """Raise CorpusError for an id outside ``[0, vocab_size)``; each rank answers for the ids that it reads."""
    for ids in (microbatch.tokens[0], microbatch.labels[0]):
        outside = torch.nonzero((ids < 0) | (ids >= vocab_size))
        if len(outside):
            row = int(outside[0])
            held = int(microbatch.shards.cu_seqlens.searchsorted(row, side="right")) - 1
            sample = microbatch.samples[microbatch.shards.sequences[held]]
            raise CorpusError(
                f"{sequences.describe(sample)} holds token id {int(ids[row])}, the model's vocabulary has {vocab_size} "
                "ids: use the tokenizer's vocabulary size (--vocab-size) or the corpus that goes with the model"
            )
