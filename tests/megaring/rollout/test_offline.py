"""Batches without a server: order, bounds, the report, files in and out, and the picture."""

from __future__ import annotations

import argparse
import json

import pytest
from fake_model import VOCABULARY, FakeExecutor, expected

from megaring.cli import main
from megaring.data.tokenizers import ByteTokenizer
from megaring.errors import UserError
from megaring.rollout.batch_files import random_prompts, read_prompts, write_outputs
from megaring.rollout.engine import Engine
from megaring.rollout.intake import EngineConfig
from megaring.rollout.offline import generate, summary_lines
from megaring.rollout.request import RequestError, SamplingParams
from megaring.rollout.steering import in_turn
from megaring.rollout.timeline import draw_timeline

CONFIG = EngineConfig(max_context=384, max_rows=64, max_running=4, max_waiting=2)


def options(**changes):
    given = {"prompts": None, "random_prompts": 12, "prompt_tokens": 60, "max_tokens": 20, "temperature": 1.0, "n": 1}
    return argparse.Namespace(**{**given, "seed": 3, **changes})


@pytest.fixture(scope="module")
def batch():
    """A batch larger than the queue, through switches: the engine, prompts, outputs and what was said."""
    engine = Engine(FakeExecutor(2), CONFIG, steer=in_turn(4))
    prompts, said = random_prompts(options(), VOCABULARY - 1), []
    return engine, prompts, generate(engine, prompts, progress=False, say=said.append), said


def test_outputs_come_in_the_order_of_the_prompts(batch):
    _, prompts, outputs, _ = batch
    assert len({len(prompt) for prompt, _ in prompts}) > 5
    for place, ((prompt, params), output) in enumerate(zip(prompts, outputs, strict=True)):
        assert output.prompt == tuple(prompt)
        drawn = expected(prompt, params, place, 0)
        assert output.samples[0].token_ids == [each.token for each in drawn]


def test_switches_are_told_and_the_batch_is_summed_up(batch):
    engine, _, outputs, said = batch
    assert said[0].startswith("step 5: TP -> DP, ")  # wanted in step 4, which it prepares
    assert len(said) == engine.metrics.switches.total() > 3
    lines = summary_lines(engine, outputs)
    tokens = sum(len(output.samples[0].tokens) for output in outputs)
    assert lines[0].startswith(f"12 requests, {tokens:,} new tokens in {len(engine.metrics.steps)} steps")
    assert lines[2].startswith(f"{len(said)} switches, 0 steps with one deferred")
    assert lines[3] == "finished: length 12"


def test_a_bar_shows_progress(capsys):
    engine = Engine(FakeExecutor(2), CONFIG, steer=in_turn(2))
    generate(engine, [([1], SamplingParams(max_tokens=4))] * 3, progress=True, say=print)
    shown = capsys.readouterr()
    assert "3/3" in shown.err
    assert "TP -> DP" in shown.out


def test_a_refused_request_ends_the_batch_by_name():
    with pytest.raises(RequestError, match="the context is 384"):
        generate(Engine(FakeExecutor(), CONFIG), [([1], SamplingParams(max_tokens=400))])


def test_files(tmp_path, batch):
    _, _, outputs, _ = batch
    write_outputs(tmp_path / "out.jsonl", outputs)
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [line["choices"][0]["token_ids"] for line in lines] == [each.samples[0].token_ids for each in outputs]
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "hi", "n": 2}\n\n{"prompt": [[1], [2, 3]], "max_tokens": 5, "stop": "x"}\n')
    first, second, third = read_prompts(options(prompts=source), ByteTokenizer())
    assert first == ((104, 105), SamplingParams(max_tokens=20, n=2))
    assert (second[0], third) == ((1,), ((2, 3), SamplingParams(max_tokens=5, stop=("x",))))


@pytest.mark.parametrize(
    ("text", "message"),
    [("\n", "has no request"), ('{"prompt": [1]}\n{"promt": 1}', "line 2: unknown field 'promt'; did you mean prompt")],
)
def test_bad_files_are_refused_by_line(tmp_path, text, message):
    (tmp_path / "in.jsonl").write_text(text)
    with pytest.raises(UserError, match=message):
        read_prompts(options(prompts=tmp_path / "in.jsonl"), ByteTokenizer())


def test_the_timeline_is_drawn(tmp_path, batch):
    pytest.importorskip("matplotlib")
    path = draw_timeline(list(batch[0].metrics.steps), tmp_path / "run.png")
    assert path.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(UserError, match="must end in one of"):
        draw_timeline(list(batch[0].metrics.steps), tmp_path / "run.docx")
    with pytest.raises(UserError, match="no step"):
        draw_timeline([], tmp_path / "run.png")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--recipe", "nowhere.yaml", "--random-prompts", "1"], "recipe nowhere.yaml"),
        (["--recipe", "recipes/tiny_cpu.yaml", "--random-prompts", "1", "--ranks", "3"], "--ranks 3 does not divide"),
        (["--recipe", "recipes/tiny_cpu.yaml", "--random-prompts", "1", "--timeline", "x.docx"], "cannot draw to"),
        (
            ["--recipe", "recipes/tiny_cpu.yaml", "--random-prompts", "1", "--turn-every", "2"],
            "--turn-every has no effect",
        ),
        (
            ["--recipe", "recipes/tiny_cpu.yaml", "--prompts", "x", "--prompt-tokens", "2"],
            "--prompt-tokens has no effect",
        ),
        (["--recipe", "recipes/tiny_cpu.yaml", "--random-prompts", "1", "--tokenizer", "no.json"], "does not exist"),
    ],
)
def test_what_cannot_work_is_refused_before_a_worker_starts(capsys, arguments, message):
    assert main(["rollout", "generate", *arguments]) == 2
    assert message in capsys.readouterr().err
