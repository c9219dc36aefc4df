"""Prompts from files or at random, outputs into files: JSON lines."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megaring.errors import UserError
from megaring.rollout.completions import choice, parse
from megaring.rollout.offline import Prompt
from megaring.rollout.request import RequestError, RequestOutput, SamplingParams
from megaring.rollout.text import Tokenizer


def read_prompts(options: argparse.Namespace, tokenizer: Tokenizer) -> list[Prompt]:
    """The requests in ``options.prompts``, a line each, in the fields of the completions format.

    ``max_tokens``, ``temperature`` and ``n`` of the options are defaults. Raises UserError that names the line.
    """
    defaults = {name: getattr(options, name) for name in ("max_tokens", "temperature", "n")}
    made: list[Prompt] = []
    try:
        lines = options.prompts.read_bytes().splitlines()
    except OSError as error:
        raise UserError(f"--prompts {options.prompts}: {error.strerror}") from None
    for place, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            asked = parse(line, "", tokenizer, defaults)
        except RequestError as error:
            raise UserError(f"{options.prompts}, line {place}: {error}") from None
        made += [(prompt, asked.params) for prompt in asked.prompts]
    if not made:
        raise UserError(f"--prompts {options.prompts} has no request; give one JSON object a line")
    return made


def random_prompts(options: argparse.Namespace, vocabulary: int) -> list[Prompt]:
    """Random tokens with output lengths that have a long tail: an eighth of ``max_tokens`` at the median."""
    random = np.random.default_rng(options.seed)
    made = []
    for place in range(options.random_prompts):
        tokens = random.integers(0, vocabulary, random.integers(1, options.prompt_tokens + 1)).tolist()
        wanted = max(1, round(options.max_tokens * random.random() ** 3))
        params = SamplingParams(wanted, temperature=options.temperature, n=options.n, seed=place, ignore_eos=True)
        made.append((tokens, params))
    return made


def write_outputs(path: Path, outputs: Sequence[RequestOutput]) -> None:
    """One request a line, its samples as the choices of the completions format."""
    with path.open("w") as file:
        for output in outputs:
            choices = [choice(each.index, each, output, logprobs=True) for each in output.samples]
            line = {"prompt_token_ids": output.prompt, "seed": output.seed, "choices": choices}
            file.write(json.dumps(line, allow_nan=False) + "\n")
