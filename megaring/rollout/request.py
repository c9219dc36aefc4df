"""What a caller asks of the engine, and what it gets back. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

STOP, LENGTH, ABORT, ERROR = "stop", "length", "abort", "error"

MOST_SAMPLES, MOST_ALTERNATIVES, MOST_STOPS = 1024, 20, 16
LARGEST_SEED = 2**63 - 1  # what a JSON client can be relied on to send


class RequestError(ValueError):
    """A request that cannot be served; the message names the field and the remedy."""


class Overloaded(RuntimeError):
    """The queue is full; the same request may be accepted later."""


@dataclass(frozen=True)
class SamplingParams:
    """How to continue a prompt. Raises RequestError, which names the field, for values outside their range.

    ``max_tokens``: most new tokens. ``min_tokens``: until so many have come, nothing ends the sample and the tokens
    that would are banned. ``temperature`` 0 is greedy; ``top_k`` 0 and ``top_p`` 1 keep every token. ``n``: samples of
    the prompt. ``seed``: names the noise together with the sample and the token index, so equal requests give equal
    tokens; None lets the engine choose one and report it. ``stop``: strings that end the text, which is cut before
    them. ``stop_token_ids`` end a sample and are its last token; so does the end-of-text token unless ``ignore_eos``.
    ``logprobs``: how many alternatives to report for each new token (its own two log-probabilities always come);
    ``prompt_logprobs``: the same for the prompt's tokens, None to leave them out. ``experts``: report which experts
    each token visited.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    n: int = 1
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int = 0
    prompt_logprobs: int | None = None
    experts: bool = False

    def __post_init__(self) -> None:
        _integer("max_tokens", self.max_tokens, 1)
        _integer("min_tokens", self.min_tokens, 0)
        _number("temperature", self.temperature, 0.0, 1e6)
        _integer("top_k", self.top_k, 0)
        _number("top_p", self.top_p, 0.0, 1.0)
        _integer("n", self.n, 1, MOST_SAMPLES)
        _integer("logprobs", self.logprobs, 0, MOST_ALTERNATIVES)
        if self.top_p == 0:
            raise RequestError("top_p is 0, which keeps no token; it is above 0 and at most 1")
        if self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens is {self.min_tokens}, more than max_tokens, {self.max_tokens}")
        if self.seed is not None:
            _integer("seed", self.seed, 0, LARGEST_SEED)
        if self.prompt_logprobs is not None:
            _integer("prompt_logprobs", self.prompt_logprobs, 0, MOST_ALTERNATIVES)
        for name in ("ignore_eos", "experts"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} is {getattr(self, name)!r}; it is true or false")
        _sequence("stop", self.stop, str, "strings")
        if "" in self.stop:
            raise RequestError("stop has an empty string, which would end every text at once; leave it out")
        _sequence("stop_token_ids", self.stop_token_ids, int, "token ids")


@dataclass(frozen=True)
class Token:
    """One new token. ``logprob``: under the model; ``sampling_logprob``: under the distribution that it was drawn
    from, after all transforms. ``version``: of the weights that made its logits. ``alternatives``: (id, logprob) of the
    most likely tokens under the model.
    """

    id: int
    logprob: float
    sampling_logprob: float
    version: int
    alternatives: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class PromptToken:
    """A prompt token's log-probability under the model, given those before it, and the most likely ones there."""

    id: int
    logprob: float
    alternatives: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, eq=False)
class SampleOutput:
    """One sample: complete, or what there was of it when it ended.

    ``text`` is None without a tokenizer. ``finish_reason``: ``stop``, ``length``, ``abort`` or ``error``; with
    ``stop``, ``stop_reason`` is the token id or the string that ended it; with ``error``, ``message`` says why.
    ``experts``: int16 ``[positions, expert layers, top-k]``, ascending expert numbers of the prompt's tokens and of all
    new ones but the last, which the model never saw; those of the forward pass whose logits were sampled from.
    """

    index: int
    tokens: tuple[Token, ...]
    text: str | None
    finish_reason: str
    stop_reason: int | str | None = None
    message: str | None = None
    experts: NDArray[np.int16] | None = None
    preemptions: int = 0

    @property
    def token_ids(self) -> list[int]:
        """The new tokens' ids."""
        return [token.id for token in self.tokens]


@dataclass(frozen=True, eq=False)
class RequestOutput:
    """A finished request. ``prompt_logprobs`` begin with the second token of the prompt. ``seed``: the one in use."""

    request: int
    prompt: tuple[int, ...]
    seed: int
    samples: tuple[SampleOutput, ...]
    prompt_logprobs: tuple[PromptToken, ...] | None = None


@dataclass(frozen=True, eq=False)
class Delta:
    """News of one sample: the tokens and the text since the last one, and ``finished`` when it has ended.

    Deltas of a sample, put together, are its output. ``completed``: set when this ends the last sample of the request.
    """

    request: int
    sample: int
    tokens: tuple[Token, ...] = ()
    text: str = ""
    finished: SampleOutput | None = None
    completed: RequestOutput | None = field(default=None, repr=False)


def _integer(name: str, value: Any, low: int, high: int = 2**31 - 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name} is {value!r}; it is an integer")
    if not low <= value <= high:
        raise RequestError(f"{name} is {value}; it is from {low} to {high}")


def _number(name: str, value: Any, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise RequestError(f"{name} is {value!r}; it is a finite number")
    if not low <= value <= high:
        raise RequestError(f"{name} is {value:g}; it is from {low:g} to {high:g}")


def _sequence(name: str, values: Any, kind: type, what: str) -> None:
    if not isinstance(values, tuple) or any(isinstance(each, bool) or not isinstance(each, kind) for each in values):
        raise RequestError(f"{name} is {values!r}; it is a tuple of {what}")
    if len(values) > MOST_STOPS:
        raise RequestError(f"{name} has {len(values)} entries; at most {MOST_STOPS} are looked for")
