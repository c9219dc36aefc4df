"""OpenAI's completions format: bodies to requests, outputs to choices. No torch, no sockets."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from megaring.rollout.request import Delta, RequestError, RequestOutput, SampleOutput, SamplingParams, Token
from megaring.rollout.text import Tokenizer

MOST_PROMPTS = 128
_SAMPLING = {field.name for field in fields(SamplingParams)}
_OTHERS = {"model", "prompt", "stream", "stream_options"}
# Of OpenAI's own, for the message that they are not served.
_NOT_SERVED = {"best_of", "echo", "frequency_penalty", "logit_bias", "presence_penalty", "suffix", "user"}


@dataclass(frozen=True)
class Completion:
    """A parsed body. ``logprobs``, ``usage``: whether choices have log-probabilities, a stream its usage at the end."""

    prompts: tuple[tuple[int, ...], ...]
    params: SamplingParams
    stream: bool = False
    usage: bool = False
    logprobs: bool = False


def parse(
    body: bytes, model: str, tokenizer: Tokenizer | None, defaults: Mapping[str, Any] | None = None
) -> Completion:
    """Read a body for the model called ``model``; ``defaults`` are of fields that it does not give.

    Raises RequestError that names what is wrong.
    """
    fields_given = {**(defaults or {}), **_json_object(body)}
    for name in fields_given:
        if name not in _SAMPLING | _OTHERS:
            raise RequestError(_unknown(name))
    given = {name: value for name, value in fields_given.items() if value is not None}
    asked = given.get("model", model)
    if asked != model:
        raise RequestError(f"model is {asked!r}; this server has {model!r}")
    stream = _boolean(given, "stream")
    options = given.get("stream_options", {})
    if not isinstance(options, dict) or set(options) - {"include_usage"}:
        raise RequestError(f"stream_options is {options!r}; its only field is include_usage")
    if options and not stream:
        raise RequestError("stream_options goes with stream: true")
    if "prompt" not in given:
        raise RequestError("prompt is missing; give token ids, text, or a list of either")
    sampling = {name: value for name, value in given.items() if name in _SAMPLING}
    if isinstance(sampling.get("stop"), str):
        sampling["stop"] = (sampling["stop"],)
    for name in ("stop", "stop_token_ids"):
        if isinstance(sampling.get(name), list):
            sampling[name] = tuple(sampling[name])
    params = SamplingParams(**sampling)
    prompts = _prompts(given["prompt"], tokenizer)
    return Completion(prompts, params, stream, _boolean(options, "include_usage"), "logprobs" in given)


def choice(index: int, output: SampleOutput, request: RequestOutput, *, logprobs: bool) -> dict[str, Any]:
    """One choice of a whole answer: a sample of ``request``, with its log-probabilities or without."""
    made = _part(index, output.tokens, output.text or "", logprobs) | _end(output)
    if output.experts is not None:
        made["experts"] = output.experts.tolist()
    if request.prompt_logprobs is not None:
        made["prompt_logprobs"] = [
            None,
            *({_name(p.id): _finite(p.logprob)} | _top(p) for p in request.prompt_logprobs),
        ]
    return made


def chunk(index: int, delta: Delta, *, logprobs: bool) -> dict[str, Any]:
    """One choice of a streamed event."""
    made = _part(index, delta.tokens, delta.text, logprobs) | {"finish_reason": None}
    if delta.finished is not None:
        made |= _end(delta.finished)
        if delta.finished.experts is not None:
            made["experts"] = delta.finished.experts.tolist()
    return made


def usage(prompts: Sequence[Sequence[int]], new: int) -> dict[str, int]:
    """Counted tokens. A prompt counts once for all of its samples."""
    read = sum(map(len, prompts))
    return {"prompt_tokens": read, "completion_tokens": new, "total_tokens": read + new}


def _part(index: int, tokens: Sequence[Token], text: str, logprobs: bool) -> dict[str, Any]:
    made: dict[str, Any] = {
        "index": index,
        "text": text,
        "token_ids": [token.id for token in tokens],
        "weight_versions": [token.version for token in tokens],
        "logprobs": None,
    }
    if logprobs:
        made["logprobs"] = {
            "tokens": [_name(token.id) for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "sampling_logprobs": [token.sampling_logprob for token in tokens],
            "top_logprobs": [_top(token) for token in tokens],
        }
    return made


def _end(output: SampleOutput) -> dict[str, Any]:
    made: dict[str, Any] = {"finish_reason": output.finish_reason, "stop_reason": output.stop_reason}
    return made | ({"message": output.message} if output.message else {})


def _top(token: Any) -> dict[str, float | None]:
    return {_name(number): _finite(value) for number, value in token.alternatives}


def _finite(value: float) -> float | None:
    """JSON has neither NaN nor -inf, which an impossible token has; they become null."""
    return value if math.isfinite(value) else None


def _name(token: int) -> str:
    return f"token_id:{token}"


def _json_object(body: bytes) -> dict[str, Any]:
    try:
        value = json.loads(body, object_pairs_hook=_no_duplicates, parse_constant=_no_constant)
    except RecursionError:
        raise RequestError("the body is nested too deeply") from None
    except RequestError:
        raise
    except ValueError as error:  # also of bytes that are not UTF-8, and of integers of thousands of digits
        raise RequestError(f"the body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise RequestError(f"the body is a JSON {type(value).__name__}; it is an object")
    return value


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise RequestError(f"{twice!r} is given twice; keep one of them")
    return made


def _no_constant(text: str) -> None:
    raise RequestError(f"{text} is not a JSON number")


def _unknown(name: str) -> str:
    if name in _NOT_SERVED:
        return f"{name} is not served here; leave it out"
    near = difflib.get_close_matches(name, _SAMPLING | _OTHERS, n=1)
    hint = f"; did you mean {near[0]}?" if near else f"; known are {', '.join(sorted(_SAMPLING | _OTHERS))}"
    return f"unknown field {name[:100]!r}{hint}"


def _boolean(given: dict[str, Any], name: str) -> bool:
    value = given.get(name, False)
    if not isinstance(value, bool):
        raise RequestError(f"{name} is {value!r}; it is true or false")
    return value


def _prompts(prompt: Any, tokenizer: Tokenizer | None) -> tuple[tuple[int, ...], ...]:
    one = isinstance(prompt, str) or (isinstance(prompt, list) and all(type(each) is int for each in prompt))
    prompts = [prompt] if one else prompt
    if not isinstance(prompts, list):
        raise RequestError(f"prompt is a {type(prompt).__name__}; give token ids, text, or a list of either")
    if len(prompts) > MOST_PROMPTS:
        raise RequestError(f"prompt has {len(prompts)} entries; at most {MOST_PROMPTS} go into one body")
    return tuple(_tokens(each, tokenizer) for each in prompts)


def _tokens(prompt: Any, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    if isinstance(prompt, str):
        if tokenizer is None:
            raise RequestError("a prompt in text needs a tokenizer, and this server has none; send token ids")
        return tuple(int(each) for each in tokenizer.encode(prompt))
    if isinstance(prompt, list) and all(type(each) is int for each in prompt):
        return tuple(prompt)
    raise RequestError("prompt is a mixture; give token ids, text, or a list of either")
