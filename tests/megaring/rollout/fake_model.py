"""A model whose logits are a hash of everything that its cache holds, and an oracle that knows no batches.

The cache keeps tokens with the version of the weights that made each entry, so a history that is lost, repeated, mixed
up or stale changes all logits from there on. Plans are checked by the worker's own rules.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np
import torch

from megaring.rollout.checks import check_plan, growth
from megaring.rollout.layout import LAYOUTS, Layout, layout_named
from megaring.rollout.ledger import Ledger
from megaring.rollout.request import SamplingParams
from megaring.rollout.sampling import Draw, Drawn, sample
from megaring.rollout.step import PlanError, StepPlan, StepResult

VOCABULARY = 40
POISON = VOCABULARY - 1  # after this token the logits are NaN
PAGES = {"TP": 10, "DP": 5, "CP": 5, "DOP": 7}


def logits_of(entries: list[tuple[int, int]]) -> np.ndarray:
    """Logits ``[vocab]`` after (token, version) entries."""
    if entries[-1][0] == POISON:
        return np.full(VOCABULARY, np.nan)
    digest = hashlib.blake2b(np.array(entries, np.int64).tobytes(), digest_size=8).digest()
    made = np.random.Generator(np.random.Philox(int.from_bytes(digest, "little"))).normal(size=VOCABULARY)
    made[POISON] = -np.inf  # never drawn
    return 2 * made


def experts_of(token: int, position: int) -> list[list[int]]:
    """Experts ``[2 layers, top-2]`` of a token."""
    return [sorted({(token + layer) % 7, 7 + position % 5}) for layer in range(2)]


class FakeExecutor:
    """Runs plans over ``ranks`` pretended ranks with ``pages`` pages on each, by layout."""

    def __init__(self, ranks: int = 2, layout: str = "TP", pages: dict[str, int] | None = None) -> None:
        self.ledger, self.layout, self.vocab_size, self.weight_version = Ledger(ranks), LAYOUTS[layout], VOCABULARY, 0
        self.pages = pages or PAGES
        self.cache: dict[int, list[tuple[int, int]]] = {}
        self.plans: list[StepPlan] = []
        self.asleep = False
        self.fails_at: int | None = None
        self.most_rows = 0

    def total_pages(self, layout: Layout) -> np.ndarray:
        return np.full(self.ledger.ranks, self.pages[layout.name])

    def shortage(self, plan: StepPlan) -> str | None:
        layout = layout_named(plan.switch_to or plan.layout)
        moved = Ledger(self.ledger.ranks)
        for number in self.ledger.requests:  # only lengths and owners: no sharing, so what is moved counts in full
            if number not in plan.release:
                moved.append(
                    number, dict(plan.owners).get(number, self.ledger.owner(number)), self.ledger.length(number)
                )
        held = (moved if plan.owners else self.ledger).pages_held(layout, () if plan.owners else plan.release)
        pages = held + growth(plan, self.ledger, layout, moved=True)
        return None if (pages <= self.total_pages(layout)).all() else f"{pages} pages of {self.total_pages(layout)}"

    def execute(self, plan: StepPlan) -> StepResult:
        assert not self.asleep
        check_plan(plan, self.ledger, self.layout, self.weight_version, VOCABULARY)
        if plan.step == self.fails_at:
            raise RuntimeError("the machine is on fire")
        if shortage := self.shortage(plan):
            raise PlanError(shortage)
        self.plans.append(plan)
        switched = plan.switch_to is not None
        self.layout = layout_named(plan.switch_to or plan.layout)
        for number in plan.release:
            self.ledger.release(number)
            del self.cache[number]
        for number, owner in plan.owners:
            self.ledger.move(number, owner)
        for fork in plan.forks:
            self.ledger.fork(fork.request, fork.source, fork.tokens)
            self.cache[fork.request] = self.cache[fork.source][: fork.tokens]
        rows, experts = [], []
        for chunk in plan.chunks:
            self.ledger.append(chunk.request, chunk.owner, len(chunk.tokens))
            cache = self.cache.setdefault(chunk.request, [])
            assert len(cache) == chunk.start
            made = []
            for token in chunk.tokens:
                experts.append(experts_of(token, len(cache)))
                cache.append((token, self.weight_version))
                made.append(logits_of(cache) if chunk.logits != "none" else None)
            rows += made[len(made) - chunk.rows_asked :]
        self.ledger.settle()
        self.most_rows = max(self.most_rows, plan.rows)
        logits = torch.from_numpy(np.array(rows).reshape(-1, VOCABULARY))
        chosen = torch.tensor(experts).view(-1, 2, 2) if plan.experts else None
        return StepResult(plan.step, self.layout.name, logits, chosen, 0.0, switched)

    def refit(self, version: int) -> None:
        self.weight_version = version

    def sleep(self) -> None:
        assert not self.cache
        self.asleep = True

    def wake(self) -> None:
        self.asleep = False

    def heartbeat(self) -> None: ...


def expected(
    prompt: list[int], params: SamplingParams, seed: int, index: int, eos: tuple[int, ...] = (), version: int = 0
) -> list[Drawn]:
    """The draws of one sample, made one by one over the whole history each time, under one version of the weights."""
    stops = set(params.stop_token_ids) | (set() if params.ignore_eos else set(eos))
    tokens, drawn = list(prompt), []
    for count in range(params.max_tokens):
        banned = tuple(sorted(stops)) if count < params.min_tokens else ()
        draw = Draw(
            seed, index, count, params.temperature, params.top_k, params.top_p, banned, alternatives=params.logprobs
        )
        (new,) = sample(torch.from_numpy(logits_of([(t, version) for t in tokens]))[None], [0], [draw])
        drawn.append(new)
        if new is None:
            break
        tokens.append(new.token)
        if new.token in stops:
            break
    return drawn


def with_seed(params: SamplingParams, seed: int) -> SamplingParams:
    return replace(params, seed=seed)
