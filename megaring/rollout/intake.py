"""What an engine is allowed, and which requests it can ever serve. No torch."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from megaring.rollout.executor import Executor
from megaring.rollout.layout import LAYOUTS, PAGE, layout_named, pages_of
from megaring.rollout.pool import longest_request
from megaring.rollout.request import RequestError, SamplingParams
from megaring.rollout.step import LAYER_AHEAD


@dataclass(frozen=True)
class EngineConfig:
    """Bounds and policies of an engine.

    ``max_rows``: tokens that the model sees in a step. ``max_running``: sequences with a history. ``max_waiting``:
    requests that have not begun; more are refused as overload. ``max_logits``: rows of one prompt whose logits are
    asked for at once. ``max_context``: most tokens of a request, prompt and new ones. ``eos``: ids that end a text.
    ``expected_growth``: the share of ``max_tokens`` that admission reckons with; 1 never has to preempt in one layout.
    ``layouts``: those that the worker may be in. ``keep_prefixes``: histories of ended sequences stay until their room
    is needed. ``rebalance_every``: steps between looks at whether owners should be evened out, 0 for never. ``seed``:
    that seeds of requests without one are derived from. ``switch_mode``: as in a plan. ``prepare_switches``: decide a
    step ahead, so that the first layer moves under the step before; not for blocking switches.
    """

    max_context: int
    max_rows: int = 2048
    max_running: int = 256
    max_waiting: int = 1024
    max_logits: int = 512
    eos: tuple[int, ...] = ()
    expected_growth: float = 0.5
    layouts: tuple[str, ...] = tuple(LAYOUTS)
    keep_prefixes: bool = False
    rebalance_every: int = 64
    seed: int = 0
    switch_mode: str = LAYER_AHEAD
    prepare_switches: bool = True

    def __post_init__(self) -> None:
        for name in ("max_context", "max_rows", "max_running", "max_waiting", "max_logits"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it is at least 1")
        if self.max_running > self.max_rows:
            raise ValueError(
                f"max_running is {self.max_running} and max_rows {self.max_rows}; each running sequence decodes a row "
                "in every step, so max_rows is at least max_running"
            )
        if not 0 <= self.expected_growth <= 1:
            raise ValueError(f"expected_growth is {self.expected_growth}; it is from 0 to 1")
        if self.rebalance_every < 0:
            raise ValueError(f"rebalance_every is {self.rebalance_every}; it is at least 0")
        if not self.layouts:
            raise ValueError(f"layouts is empty; name some of {', '.join(LAYOUTS)}")
        for name in self.layouts:
            layout_named(name)


def check_request(prompt: tuple[int, ...], params: SamplingParams, config: EngineConfig, executor: Executor) -> None:
    """Raise RequestError, with the arithmetic, for a request that ``executor`` can never serve."""
    if not prompt:
        raise RequestError("the prompt is empty; give at least one token")
    for what, ids in (("the prompt", prompt), ("stop_token_ids", params.stop_token_ids)):
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < executor.vocab_size:
                raise RequestError(f"{what} has {token!r}; token ids are integers from 0 to {executor.vocab_size - 1}")
    tokens = len(prompt) + params.max_tokens
    asked = f"a prompt of {len(prompt)} tokens and max_tokens {params.max_tokens}"
    if tokens > config.max_context:
        raise RequestError(
            f"{asked} are {tokens}; the context is {config.max_context}. Shorten the prompt or ask for at most "
            f"{max(0, config.max_context - len(prompt))} tokens"
        )
    layouts = [LAYOUTS[name] for name in config.layouts]
    room = {each.name: longest_request(each, executor.total_pages(each)) for each in layouts}
    best = max(room, key=room.__getitem__)
    pages = pages_of(tokens - 1)  # the last token is never cached
    if pages > room[best]:
        raise RequestError(
            f"{asked} cache up to {tokens - 1} tokens, {pages} pages of {PAGE}; the roomiest layout, {best}, has "
            f"{room[best]} for one request. Shorten the prompt, ask for at most "
            f"{max(0, room[best] * PAGE + 1 - len(prompt))} tokens, or give the worker more memory"
        )


def derived_seed(seed: int, request: int) -> int:
    """The seed of a request that names none, from the engine's and its number."""
    digest = hashlib.blake2b(f"{seed}:{request}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
