"""What makes a plan impossible, found on every rank alike before anything changes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from megaring.rollout.layout import PAGE, Layout, layout_named, pages_of
from megaring.rollout.ledger import Ledger, pages_by_rank
from megaring.rollout.step import ALL, BLOCKING, LAST, LAYER_AHEAD, NO_LOGITS, PlanError, StepPlan


def check_plan(plan: StepPlan, ledger: Ledger, layout: Layout, weight_version: int | None, vocab_size: int) -> None:
    """Raise PlanError that names what is wrong with ``plan`` for a worker in this state."""
    if weight_version is None:
        raise PlanError(f"step {plan.step} finds no weights in place; the worker sleeps, or a refit failed")
    if plan.layout != layout.name:
        raise PlanError(f"step {plan.step} is planned for {plan.layout}, but the worker is in {layout}")
    if plan.switch_to is not None:
        layout_named(plan.switch_to)
    if plan.prepare is not None:
        after = layout_named(plan.prepare)
        if plan.switch_to is not None or plan.owners or after is layout or not plan.chunks:
            raise PlanError(
                f"step {plan.step} cannot prepare a switch to {after}: it moves state itself, is in that layout "
                "already, or has no tokens"
            )
    if plan.mode not in (BLOCKING, LAYER_AHEAD):
        raise PlanError(f"a switch is {BLOCKING} or {LAYER_AHEAD}, not {plan.mode!r}")
    if plan.weight_version != weight_version:
        raise PlanError(
            f"step {plan.step} wants weights of version {plan.weight_version}, but those in use are version "
            f"{weight_version}; refit first"
        )
    _check_unique("released", list(plan.release))
    _check_unique("moved", [request for request, _ in plan.owners])
    _check_unique("given tokens", [chunk.request for chunk in plan.chunks])
    lengths = {number: (each.length, each.owner) for number, each in ledger.requests.items()}
    for request in plan.release:
        _known(lengths, request, "released")
        del lengths[request]
    for request, owner in plan.owners:
        length, _ = _known(lengths, request, "moved")
        lengths[request] = (length, _owner(request, owner, ledger.ranks))
    for fork in plan.forks:
        length, owner = _known(lengths, fork.source, "forked")
        if fork.request in lengths:
            raise PlanError(f"request {fork.request} exists already; a fork begins a new one")
        if not 1 <= fork.tokens <= length:
            raise PlanError(f"request {fork.source} has {length} tokens; {fork.tokens} of them cannot be shared")
        lengths[fork.request] = (fork.tokens, owner)
    for chunk in plan.chunks:
        length, owner = lengths.get(chunk.request, (0, chunk.owner))
        if (chunk.start, chunk.owner) != (length, owner):
            raise PlanError(
                f"request {chunk.request} has {length} tokens at owner {owner}; its chunk starts at {chunk.start} "
                f"with owner {chunk.owner}"
            )
        _owner(chunk.request, chunk.owner, ledger.ranks)
        if not chunk.tokens:
            raise PlanError(f"the chunk of request {chunk.request} is empty")
        if min(chunk.tokens) < 0 or max(chunk.tokens) >= vocab_size:
            raise PlanError(f"request {chunk.request} has a token outside the vocabulary of {vocab_size}")
        if chunk.logits not in (NO_LOGITS, LAST, ALL):
            raise PlanError(f"logits of a chunk are {NO_LOGITS}, {LAST} or {ALL}, not {chunk.logits!r}")


def growth(plan: StepPlan, ledger: Ledger, layout: Layout, *, moved: bool) -> NDArray[np.int64]:
    """Pages of one layer that each rank needs at most for what ``plan`` adds under ``layout``, ``[ranks]``.

    ``moved``: whether the plan's changes of owners are made.
    """
    made = np.zeros(ledger.ranks, np.int64)
    owners = {number: each.owner for number, each in ledger.requests.items() if number not in plan.release}
    owners |= dict(plan.owners) if moved else {}
    begun = dict.fromkeys(plan.release, 0)  # tokens of requests that begin in this plan, by fork or under an old number
    for fork in plan.forks:
        owners[fork.request] = owners[fork.source]
        begun[fork.request] = fork.tokens
        if fork.tokens % PAGE:  # copied now or by whoever appends first
            made += pages_by_rank(np.array([fork.tokens // PAGE]), owners[fork.source], layout, ledger.ranks)
    for chunk in plan.chunks:
        tokens, owner = len(chunk.tokens), owners.get(chunk.request, chunk.owner)
        if chunk.request in begun:
            indices = np.arange(pages_of(begun[chunk.request]), pages_of(begun[chunk.request] + tokens))
            made += pages_by_rank(indices, owner, layout, ledger.ranks)
        else:
            made += ledger.new_pages(chunk.request, owner, tokens, layout)
    return made


def _known(lengths: dict[int, tuple[int, int]], request: int, what: str) -> tuple[int, int]:
    if request not in lengths:
        raise PlanError(f"request {request} is to be {what}, but there is none of that number")
    return lengths[request]


def _owner(request: int, owner: int, ranks: int) -> int:
    if not 0 <= owner < ranks:
        raise PlanError(f"request {request} has owner {owner}; the group has ranks 0 to {ranks - 1}")
    return owner


def _check_unique(what: str, requests: list[int]) -> None:
    if len(set(requests)) < len(requests):
        twice = next(each for each in requests if requests.count(each) > 1)
        raise PlanError(f"request {twice} is {what} twice in one plan")
