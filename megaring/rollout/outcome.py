"""What a step's logits and expert choices mean for its sequences: new tokens, ends, failures."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from megaring.rollout.compose import Draft
from megaring.rollout.queues import Queues
from megaring.rollout.request import ERROR, LENGTH, STOP, Delta, PromptToken, Token
from megaring.rollout.sampling import Draw, Drawn, sample, token_logprobs
from megaring.rollout.sequence import Sequence
from megaring.rollout.step import StepResult

_BAD_ROW = "the model gave logits that are no distribution (NaN, +inf, or nothing but -inf) for token {}"


class Outcome:
    """Applies results to the sequences in ``queues``. ``keep_prefixes``: whether histories of ended ones stay."""

    def __init__(self, queues: Queues, keep_prefixes: bool) -> None:
        self._queues, self._keep_prefixes = queues, keep_prefixes

    def apply(self, draft: Draft, result: StepResult, version: int) -> list[Delta]:
        """Draw the next token of every sequence whose last row is there; ``version``: of the weights that ran."""
        if result.experts is not None:
            self._record_experts(draft, result.experts)
        rows, drawing = 0, []
        for sequence, chunk in zip(draft.work, draft.chunks, strict=True):
            if sequence.request.wants_prompt_logprobs:
                self._read_prompt(sequence, chunk.start, result.logits[rows : rows + chunk.rows_asked])
            rows += chunk.rows_asked
            if not sequence.pending:
                drawing += [(each, rows - 1) for each in self._who_draws(sequence)]
        drawn = sample(result.logits, [row for _, row in drawing], [draw_of(each) for each, _ in drawing])
        return [self._accept(each, new, version) for (each, _), new in zip(drawing, drawn, strict=True)]

    def end(self, sequence: Sequence, reason: str, stop: int | str | None = None, message: str | None = None) -> Delta:
        """End a sequence and give its room back, but for a history that others may want."""
        if sequence.text is not None:
            found = sequence.text.finish(len(sequence.output) >= sequence.request.params.min_tokens)
            if found is not None and reason == LENGTH:
                reason, stop = STOP, found
        fresh = sequence.text.take(everything=True) if sequence.text is not None else ""
        if sequence in self._queues:
            siblings = any(each in self._queues.waiting for each in sequence.request.samples if each is not sequence)
            useful = reason in (STOP, LENGTH) and (self._keep_prefixes or siblings)
            self._queues.end(sequence, retain=useful)
        finished = sequence.finish(reason, stop, message)
        request = sequence.request
        return Delta(request.number, sequence.index, (), fresh, finished, request.output())

    def _who_draws(self, sequence: Sequence) -> Iterable[Sequence]:
        """A prompt is read once for all samples: the first one's last row gives every first token."""
        request = sequence.request
        if sequence.output or request.first_drawn:
            return [sequence]
        self._queues.prefixes.add(sequence.history, request.prompt)
        for other in request.samples[1:]:
            other.experts, other.experts_known = list(sequence.experts), sequence.experts_known
            self._queues.wait(other)
        return request.samples

    def _accept(self, sequence: Sequence, drawn: Drawn | None, version: int) -> Delta:
        params = sequence.request.params
        if drawn is None:
            return self.end(sequence, ERROR, message=_BAD_ROW.format(len(sequence.output)))
        token = Token(drawn.token, drawn.logprob, drawn.sampling_logprob, version, drawn.alternatives)
        sequence.output.append(token)
        sequence.tokens.append(token.id)
        count, delta = len(sequence.output), None
        if token.id in sequence.request.stops:
            delta = self.end(sequence, STOP, token.id)
        else:
            found = sequence.text.push(token.id, count >= params.min_tokens) if sequence.text is not None else None
            if found is not None:
                delta = self.end(sequence, STOP, found)
            elif count == params.max_tokens:
                delta = self.end(sequence, LENGTH)
        if delta is not None:
            return Delta(delta.request, delta.sample, (token,), delta.text, delta.finished, delta.completed)
        text = sequence.text.take(everything=False) if sequence.text is not None else ""
        return Delta(sequence.request.number, sequence.index, (token,), text)

    def _read_prompt(self, sequence: Sequence, start: int, logits: torch.Tensor) -> None:
        """Rows from position ``start`` predict the tokens after them; those of earlier passes are known already."""
        request = sequence.request
        known = 1 + len(request.prompt_logprobs)  # the next token whose log-probability is missing
        first, last = known - 1 - start, min(len(request.prompt) - 1 - start, len(logits))
        if not 0 <= first < last:
            return
        tokens = request.prompt[start + first + 1 : start + last + 1]
        found = token_logprobs(logits[first:last], tokens, request.params.prompt_logprobs)
        request.prompt_logprobs += [
            PromptToken(token, value, likeliest) for token, (value, likeliest) in zip(tokens, found, strict=True)
        ]

    def _record_experts(self, draft: Draft, experts: torch.Tensor) -> None:
        chosen, row = experts.cpu().numpy().astype(np.int16), 0
        for sequence, chunk in zip(draft.work, draft.chunks, strict=True):
            if sequence.request.params.experts:
                sequence.record_experts(chosen[row : row + len(chunk.tokens)], chunk.start)
            row += len(chunk.tokens)


def draw_of(sequence: Sequence) -> Draw:
    """What the next token of a sequence is drawn with."""
    request, params = sequence.request, sequence.request.params
    index = len(sequence.output)
    return Draw(
        request.seed,
        sequence.index,
        index,
        params.temperature,
        params.top_k,
        params.top_p,
        tuple(sorted(request.stops)) if index < params.min_tokens else (),
        params.logprobs,
    )
