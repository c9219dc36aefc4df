"""The state of one sample of a request while it lives. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from megaring.rollout.layout import pages_of
from megaring.rollout.request import (
    ERROR,
    PromptToken,
    RequestOutput,
    SampleOutput,
    SamplingParams,
    Token,
)
from megaring.rollout.text import GrowingText


@dataclass(eq=False)
class Request:
    """A prompt and its samples. ``stops``: ids that end a sample, which may not come before ``min_tokens``."""

    number: int
    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int
    stops: frozenset[int]
    samples: list[Sequence] = field(default_factory=list)
    prompt_logprobs: list[PromptToken] = field(default_factory=list)

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether some of them are still missing."""
        return self.params.prompt_logprobs is not None and len(self.prompt_logprobs) < len(self.prompt) - 1

    @property
    def first_drawn(self) -> bool:
        """Whether the prompt has been read and every sample has its first token."""
        return bool(self.samples[0].output) or self.samples[0].finished is not None

    def output(self) -> RequestOutput | None:
        """The whole answer, once every sample has ended."""
        ended = tuple(each.finished for each in self.samples)
        if any(each is None for each in ended):
            return None
        wanted = self.params.prompt_logprobs is not None
        logprobs = tuple(self.prompt_logprobs) if wanted else None
        return RequestOutput(self.number, self.prompt, self.seed, ended, logprobs)


@dataclass(eq=False)
class Sequence:
    """One sample: its tokens, and the history that it has in the ledger while it runs.

    ``tokens``: prompt and new ones; the first ``cached`` are in the ledger, under ``history``. ``version``: of the
    oldest weights that made any of them. ``shares_last``: its last page may have other users.
    """

    request: Request
    index: int
    tokens: list[int]
    text: GrowingText | None
    output: list[Token] = field(default_factory=list)
    history: int | None = None
    cached: int = 0
    version: int = 0
    shares_last: bool = False
    experts: list[NDArray[np.int16]] = field(default_factory=list)
    experts_known: int = 0
    preemptions: int = 0
    finished: SampleOutput | None = None

    @property
    def order(self) -> tuple[int, int]:
        """By age: older sequences go first."""
        return self.request.number, self.index

    @property
    def pending(self) -> int:
        """Tokens that the model has to see before the next one can be drawn."""
        return len(self.tokens) - self.cached

    def projected(self, share: float) -> int:
        """Pages that it will have cached when it has grown by ``share`` of what it may still grow by."""
        left = self.request.params.max_tokens - len(self.output)
        return pages_of(len(self.tokens) + int(np.ceil(share * left)))

    def forget(self) -> None:
        """Its history is gone from the ledger."""
        self.history, self.cached, self.shares_last = None, 0, False

    def record_experts(self, chosen: NDArray[np.int16], start: int) -> None:
        """Keep the choices of the tokens from position ``start``, but for those that are known from an earlier pass."""
        fresh = chosen[self.experts_known - start :] if start <= self.experts_known else chosen[:0]
        if len(fresh):
            self.experts.append(fresh)
            self.experts_known += len(fresh)

    def finish(self, reason: str, stop: int | str | None = None, message: str | None = None) -> SampleOutput:
        """End it and make its output."""
        if reason == ERROR and message is None:
            raise ValueError("a sample that fails has a message")
        experts = np.concatenate(self.experts) if self.experts else None
        text = self.text.text if self.text is not None else None
        self.finished = SampleOutput(
            self.index, tuple(self.output), text, reason, stop, message, experts, self.preemptions
        )
        return self.finished
