"""Continuous batching over an executor: requests in, tokens out, one step at a time.

An engine belongs to one thread, on the rank that holds the queue; ``loop.py`` shares it with others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from megaring.rollout.choice import Choice, Chooser
from megaring.rollout.executor import Executor
from megaring.rollout.intake import EngineConfig, check_request, derived_seed
from megaring.rollout.layout import PAGE, pages_of
from megaring.rollout.metrics import Metrics, StepRecord
from megaring.rollout.outcome import Outcome
from megaring.rollout.pool import longest_request
from megaring.rollout.queues import Queues
from megaring.rollout.request import ABORT, ERROR, Delta, Overloaded, RequestError, RequestOutput, SamplingParams
from megaring.rollout.sequence import Request, Sequence
from megaring.rollout.steering import Steer
from megaring.rollout.step import StepResult
from megaring.rollout.text import GrowingText, Tokenizer

KEEP, RECOMPUTE = "keep", "recompute"


class EngineFailed(RuntimeError):
    """A step failed in a way that leaves the executor unusable; the message says how."""


class Engine:
    """Requests over an ``executor``. ``steer`` names the layout of each step; without it the executor's stays.

    With a ``tokenizer`` outputs have text and requests may have stop strings. ``metrics`` counts everything.
    """

    def __init__(
        self,
        executor: Executor,
        config: EngineConfig,
        *,
        steer: Steer | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        if executor.layout.name not in config.layouts:
            raise ValueError(
                f"the executor begins in {executor.layout}, which is not among {', '.join(config.layouts)}"
            )
        self.executor, self.config, self.tokenizer = executor, config, tokenizer
        self.metrics = Metrics()
        self.paused = self.asleep = False
        self.failure: str | None = None
        self._queues = Queues()
        self._outcome = Outcome(self._queues, config.keep_prefixes)
        self._chooser = Chooser(executor, self._queues, config, steer)
        self._requests: dict[int, Request] = {}
        self._news: list[Delta] = []
        self._next_request = self._next_step = 0

    @property
    def running(self) -> int:
        """Sequences with a history."""
        return len(self._queues.running)

    @property
    def waiting(self) -> int:
        """Sequences that wait for room."""
        return len(self._queues.waiting)

    @property
    def live(self) -> tuple[int, ...]:
        """Requests that have not been completed, oldest first."""
        return tuple(self._requests)

    @property
    def kv_use(self) -> float:
        """Part of the fullest rank's KV pages in use."""
        total = self.executor.total_pages(self.executor.layout)
        return float((self.executor.ledger.pages_held(self.executor.layout) / total.clip(1)).max())

    @property
    def has_work(self) -> bool:
        """Whether ``step`` would do anything."""
        resting = self.paused or self.asleep
        return bool(self._news or self._queues.release or (self._requests and not resting))

    def add(self, prompt: Iterable[int], params: SamplingParams) -> int:
        """Queue a request; returns its number. Raises RequestError for one that can never be served, with the
        arithmetic, Overloaded when the queue is full, and EngineFailed after a failure.
        """
        self._check_alive()
        prompt = tuple(prompt)
        check_request(prompt, params, self.config, self.executor)
        if params.stop and self.tokenizer is None:
            raise RequestError("stop strings need a tokenizer, and this engine has none; use stop_token_ids")
        if self.queued_requests >= self.config.max_waiting:
            self.metrics.refused += 1
            raise Overloaded(f"{self.queued_requests} requests wait already, which is the most; try again later")
        number, self._next_request = self._next_request, self._next_request + 1
        seed = params.seed if params.seed is not None else derived_seed(self.config.seed, number)
        stops = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else frozenset(self.config.eos))
        request = Request(number, prompt, params, seed, stops)
        for index in range(params.n):
            text = GrowingText(self.tokenizer, params.stop) if self.tokenizer is not None else None
            request.samples.append(Sequence(request, index, list(prompt), text))
        self._requests[number] = request
        self._queues.wait(request.samples[0])  # the others follow once it has read the prompt
        return number

    @property
    def queued_requests(self) -> int:
        """Requests of which no sample has begun."""
        return sum(each.index == 0 and not each.output for each in self._queues.waiting)

    def abort(self, number: int) -> RequestOutput | None:
        """End a request now; returns what there is of it, or None if it is not live. Its pages are free from the next
        step on, which also returns its last deltas.
        """
        request = self._requests.pop(number, None)
        if request is None:
            return None
        for sequence in request.samples:
            if sequence.finished is None:
                self._tell(self._outcome.end(sequence, ABORT))
        if not self.config.keep_prefixes:
            self._queues.evict_unneeded()
        return request.output()

    def pause(self) -> None:
        """Give nobody any rows until ``resume``. Requests can be added and aborted; histories stay."""
        self.paused = True

    def resume(self) -> None:
        """Go on after ``pause``."""
        self.paused = False

    def refit(self, version: int, live: str = RECOMPUTE) -> None:
        """Put the weights of ``version`` in place between two steps.

        ``live``: requests that run ``recompute`` their history under the new weights, or ``keep`` it as the old ones
        made it. New tokens carry the new version either way, those that are there keep theirs. No history from before
        is shared with anybody that begins later. Works asleep too. Raises ValueError for another policy.
        """
        self._check_alive()
        if live not in (KEEP, RECOMPUTE):
            raise ValueError(f"live requests {KEEP} or {RECOMPUTE} their history over a refit, not {live!r}")
        self._queues.drop_prefixes()
        if live == RECOMPUTE:
            self._release_all()
        self._guarded(self.executor.refit, version)

    def sleep(self) -> None:
        """Free the memory of all histories and replicated projections. Live requests stay, and compute their history
        anew after ``wake``; until then nothing runs.
        """
        self._check_alive()
        if self.asleep:
            return
        self._queues.drop_prefixes()
        self._release_all()
        self._flush()
        self._guarded(self.executor.sleep)
        self.asleep = True

    def wake(self) -> None:
        """Go on after ``sleep``."""
        self._check_alive()
        if self.asleep:
            self._guarded(self.executor.wake)
            self.asleep = False

    def heartbeat(self) -> None:
        """Call it now and then while there is no work; see ``Executor``."""
        self._check_alive()
        self._guarded(self.executor.heartbeat)

    def step(self) -> list[Delta]:
        """Run one step and return what is new, oldest sequence first. Raises EngineFailed when it cannot go on."""
        self._check_alive()
        began = self.metrics.now()
        if self.paused or self.asleep or not self._requests:
            self._flush()
            return self._take_news()
        choice = self._chooser.choose(self._next_step)
        if not choice.draft.chunks:
            self._fail_stuck()
            return self._take_news()
        result = self._guarded(self.executor.execute, choice.plan)
        self._carry_out(choice)
        deltas = self._outcome.apply(choice.draft, result, choice.plan.weight_version)
        for delta in deltas:
            self._tell(delta)
        if not self.config.keep_prefixes:
            self._queues.evict_unneeded()
        self._record(choice, result, began, deltas)
        return self._take_news()

    def _carry_out(self, choice: Choice) -> None:
        """The step has run: the queues follow."""
        queues, draft = self._queues, choice.draft
        for history in draft.evicted:
            queues.evict(history)
        for sequence in draft.preempted:
            queues.preempt(sequence)
        queues.release.clear()
        for sequence, history in draft.starts:
            queues.start(sequence, history)
            sequence.version = choice.plan.weight_version
        holders = {each.history: each for each in queues.running}
        for fork in draft.forks:
            queues.touch(fork.source)
            if fork.tokens % PAGE and fork.source in holders:
                holders[fork.source].shares_last = True
        for sequence, chunk in zip(draft.work, draft.chunks, strict=True):
            sequence.cached = chunk.start + len(chunk.tokens)
            sequence.shares_last = False
        self._next_step += 1

    def _flush(self) -> None:
        """Give back what ended sequences held, without waiting for a step that computes."""
        if self._queues.release:
            choice = self._chooser.release_only(self._next_step)
            self._guarded(self.executor.execute, choice.plan)
            self._carry_out(choice)

    def _release_all(self) -> None:
        for sequence in list(self._queues.running):
            self._queues.preempt(sequence)
            sequence.preemptions -= 1  # nobody older took its room

    def _fail_stuck(self) -> None:
        """Nothing can run in any layout that can be reached: give up the oldest sequence rather than wait forever."""
        self._flush()
        oldest, layout = min(self._queues, key=lambda each: each.order), self.executor.layout
        room = longest_request(layout, self.executor.total_pages(layout))
        message = (
            f"{len(oldest.tokens)} tokens need {pages_of(len(oldest.tokens))} pages of {PAGE}; {layout} has {room} for "
            "one request, and no switch to a roomier layout has room now"
        )
        self._tell(self._outcome.end(oldest, ERROR, message=message))

    def _record(self, choice: Choice, result: StepResult, began: float, deltas: list[Delta]) -> None:
        before = choice.plan.layout
        self.metrics.record(
            StepRecord(
                step=choice.plan.step,
                began=began,
                seconds=self.metrics.now() - began,
                layout=result.layout,
                rows=choice.plan.rows,
                drawn=sum(len(delta.tokens) for delta in deltas),
                running=self.running,
                waiting=self.waiting,
                kv_use=self.kv_use,
                preempted=len(choice.draft.preempted),
                switched_from=before if result.layout != before else None,
                deferred=choice.deferred or result.deferred,
                moved_bytes=result.moved_bytes,
            )
        )

    def _tell(self, delta: Delta) -> None:
        self._news.append(delta)
        if delta.finished is not None:
            self.metrics.finished[delta.finished.finish_reason] += 1
        if delta.completed is not None:
            self._requests.pop(delta.request, None)

    def _take_news(self) -> list[Delta]:
        news, self._news = self._news, []
        return news

    def _check_alive(self) -> None:
        if self.failure is not None:
            raise EngineFailed(self.failure)

    def _guarded[T](self, call: Callable[..., T], *arguments: object) -> T:
        """Any error of the executor ends the engine: what its ranks hold is not known any more."""
        try:
            return call(*arguments)
        except Exception as error:
            self.failure = f"{type(error).__name__}: {error}"
            raise EngineFailed(self.failure) from error
