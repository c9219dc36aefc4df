"""``megaring rollout generate`` and ``serve``: their options, and what each of the ranks does."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megaring.errors import UserError
from megaring.options import above_zero, non_negative, number, positive
from megaring.rollout.launch import launch

GENERATE = """\
Generate for a batch of prompts on T ranks and report what happened: switches of layout as they come, tokens per second,
steps in each layout; on request the outputs as JSON lines and a picture of the run.
"""
SERVE = """\
Serve a model on localhost: POST /v1/completions in OpenAI's format (token ids or text, streaming), GET /v1/models,
/health and /metrics. Ends cleanly on Ctrl-C or SIGTERM.
"""
GENERATE_EXAMPLES = """\
examples:
  megaring rollout generate --recipe recipes/tiny_cpu.yaml --ranks 2 --random-prompts 24 --layout turn
  megaring rollout generate --recipe recipes/tiny_cpu.yaml --prompts prompts.jsonl --output out.jsonl

a line of --prompts: {"prompt": "text" or [ids], "max_tokens": 64, "temperature": 0.8, "n": 4, "seed": 1, ...}
"""
SERVE_EXAMPLES = """\
example:
  megaring rollout serve --recipe recipes/tiny_cpu.yaml --ranks 2 --port 8000 &
  curl http://127.0.0.1:8000/v1/completions -d '{"prompt": "Once", "max_tokens": 16, "seed": 1}'
"""
CHOICES = ("auto", "turn", "TP", "DP", "CP", "DOP")


def add_generate_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``generate``."""
    _add_worker_arguments(parser)
    group = parser.add_argument_group("prompts")
    source = group.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompts", type=Path, metavar="FILE.jsonl", help="one request a line, as shown below")
    source.add_argument("--random-prompts", type=positive, metavar="N", help="random tokens, a few with long outputs")
    group.add_argument("--prompt-tokens", type=positive, metavar="N", help="longest random prompt; default: 256")
    group.add_argument("--max-tokens", type=positive, default=64, metavar="N", help="most new tokens; default: 64")
    group.add_argument("--temperature", type=number, default=1.0, metavar="X", help="default: 1")
    group.add_argument("--n", type=positive, default=1, metavar="N", help="samples of each prompt; default: 1")
    group = parser.add_argument_group("output")
    group.add_argument("--output", type=Path, metavar="FILE.jsonl", help="write the outputs, one request a line")
    group.add_argument("--timeline", type=Path, metavar="FILE.png", help="draw layouts, sequences and step times")
    parser.set_defaults(run=run_generate)


def add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``serve``."""
    _add_worker_arguments(parser)
    group = parser.add_argument_group("server")
    group.add_argument("--host", default="127.0.0.1", help="default: 127.0.0.1")
    group.add_argument("--port", type=non_negative, default=8000, help="default: 8000; 0 takes a free one")
    group.add_argument("--model-name", default="megaring", help="what clients call the model; default: megaring")
    group.add_argument("--max-waiting", type=positive, default=1024, metavar="N", help="queued requests; default: 1024")
    group.add_argument(
        "--request-seconds",
        type=above_zero,
        default=3600.0,
        metavar="S",
        help="a request is aborted after; default: 3600",
    )
    group.add_argument(
        "--keep-prefixes", action="store_true", help="later prompts may share what ended ones have cached"
    )
    parser.set_defaults(run=run_serve)


def _add_worker_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    group.add_argument("--recipe", type=Path, metavar="FILE.yaml", required=True, help="Megatron option names")
    group.add_argument("--load", type=Path, metavar="DIR", help="checkpoints of training; default: random weights")
    group.add_argument("--tokenizer", default="byte", metavar="NAME", help="'byte' or a tokenizer.json; default: byte")
    group.add_argument("--vocab-size", type=positive, metavar="N", help="default: the recipe's, else the tokenizer's")
    group.add_argument("--seed", type=non_negative, default=0, help="of random weights, prompts and noise; default: 0")
    group = parser.add_argument_group("worker")
    group.add_argument("--ranks", type=positive, default=1, metavar="T", help="processes, one for each GPU; default: 1")
    group.add_argument("--memory", type=above_zero, metavar="MIB", help="of each rank, for projections and KV")
    group.add_argument("--layout", choices=CHOICES, default="auto", help="default: auto, by the cost model")
    group.add_argument("--turn-every", type=positive, metavar="N", help="steps in each, for --layout turn; default: 16")
    group.add_argument("--max-rows", type=positive, default=512, metavar="N", help="tokens of a step; default: 512")
    group.add_argument("--max-running", type=positive, default=64, metavar="N", help="sequences; default: 64")


def run_generate(options: argparse.Namespace) -> int:
    """Run the batch. Raises UserError for what cannot be run."""
    if options.prompts is not None and options.prompt_tokens is not None:
        raise UserError("--prompt-tokens has no effect with --prompts: it is for --random-prompts; leave one out")
    options.prompt_tokens = options.prompt_tokens or 256
    if options.timeline is not None:
        from megaring.rollout.timeline import new_figure

        new_figure(options.timeline)  # before anything is computed: can it be drawn there?
    return _on_ranks(options, _generate)


def run_serve(options: argparse.Namespace) -> int:
    """Serve until told to end. Raises UserError for what cannot be served."""
    return _on_ranks(options, _serve)


def _on_ranks(options: argparse.Namespace, lead: Callable[[argparse.Namespace, Any, Any], None]) -> int:
    """Start the ranks, or, as one of them (also of torchrun's), build the worker: rank 0 leads, the others follow."""
    if options.turn_every is not None and options.layout != "turn":
        raise UserError(
            f"--turn-every has no effect with --layout {options.layout}; give --layout turn, or leave it out"
        )
    options.turn_every = options.turn_every or 16
    _config(options)  # an error here is the same everywhere, so say it once and early
    if "RANK" not in os.environ:
        return launch([sys.executable, "-m", "megaring.cli", *sys.argv[1:]], options.ranks)
    from megaring.failure import fail

    try:
        if int(os.environ["WORLD_SIZE"]) != options.ranks:
            raise UserError(f"there are {os.environ['WORLD_SIZE']} processes for --ranks {options.ranks}")
        _work(options, lead)
    except KeyboardInterrupt:
        os._exit(130)  # not sys.exit: peers must not wait for this rank in an exit handler
    except Exception as error:
        fail("megaring", error, quiet=isinstance(error, UserError) and os.environ["RANK"] != "0")
    return 0


def _work(options: argparse.Namespace, lead: Callable[[argparse.Namespace, Any, Any], None]) -> None:
    # Missing optional packages and deprecations of its own, once per rank: 'megaring doctor' says it better.
    warnings.filterwarnings("ignore", module="megatron")
    warnings.filterwarnings("ignore", message="invalid escape sequence", category=SyntaxWarning)
    import torch

    from megaring.rollout import worker
    from megaring.rollout.driver import Driver, follow
    from megaring.rollout.microbenchmarks import calibrate

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    runner = worker.start(_config(options))
    calibration = calibrate(runner) if options.layout == "auto" else None
    if runner.ranks.rank:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 ends the group, or its loss does
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        follow(runner)
        worker.stop(runner)
        return
    driver = Driver(runner)
    if calibration is not None:
        print("\n".join(calibration.lines()), flush=True)
    lead(options, driver, _steer(options, runner, calibration))
    worker.stop(runner, driver.stop)


def _config(options: argparse.Namespace):
    """The worker's configuration, checked."""
    from megaring.megatron.config import ModelConfig
    from megaring.recipe import parse
    from megaring.rollout.worker_config import WorkerConfig

    recipe = parse(["--recipe", str(options.recipe)])
    recipe.vocab_size = options.vocab_size or recipe.vocab_size or _tokenizer(options).vocab_size
    model = ModelConfig.from_options(recipe)
    start = options.layout if options.layout in ("TP", "DP", "CP", "DOP") else "TP"
    memory = int(options.memory * 2**20) if options.memory else None
    return WorkerConfig(model, options.ranks, start, options.seed, memory, options.load)


def _tokenizer(options: argparse.Namespace):
    from megaring.data.tokenizers import load_tokenizer

    return load_tokenizer(options.tokenizer)


def _steer(options: argparse.Namespace, runner: Any, calibration: Any):
    from megaring.rollout.scheduler import Scheduler
    from megaring.rollout.steering import by_cost, in_turn
    from megaring.rollout.worker import cost_group

    if calibration is not None:
        return by_cost(cost_group(runner, calibration), Scheduler(runner.layout))
    return in_turn(options.turn_every) if options.layout == "turn" else None


def _engine(options: argparse.Namespace, driver: Any, steer: Any, **changes: Any):
    from megaring.rollout.engine import Engine
    from megaring.rollout.intake import EngineConfig

    tokenizer, model = _tokenizer(options), _config(options).model
    if tokenizer.vocab_size > driver.vocab_size:
        raise UserError(f"--tokenizer has {tokenizer.vocab_size} ids, the model {driver.vocab_size}; give its own")
    fixed = options.layout in ("TP", "DP", "CP", "DOP")
    config = EngineConfig(
        max_context=model.seq_length,
        max_rows=options.max_rows,
        max_running=min(options.max_running, options.max_rows),
        eos=() if tokenizer.eod_id is None else (tokenizer.eod_id,),
        seed=options.seed,
        **({"layouts": (options.layout,)} if fixed else {}),
        **changes,
    )
    return Engine(driver, config, steer=steer, tokenizer=tokenizer)


def _generate(options: argparse.Namespace, driver: Any, steer: Any) -> None:
    from megaring.rollout.batch_files import random_prompts, read_prompts, write_outputs
    from megaring.rollout.intake import check_request
    from megaring.rollout.offline import generate, summary_lines
    from megaring.rollout.request import RequestError
    from megaring.rollout.timeline import draw_timeline

    engine = _engine(options, driver, steer)
    prompts = read_prompts(options, engine.tokenizer) if options.prompts else random_prompts(options, driver.vocab_size)
    for place, (prompt, params) in enumerate(prompts, start=1):
        try:
            check_request(tuple(prompt), params, engine.config, driver)
        except RequestError as error:
            raise UserError(f"request {place} of {len(prompts)}: {error}") from None
    outputs = generate(engine, prompts, say=lambda line: print(line, flush=True))
    if options.output is not None:
        write_outputs(options.output, outputs)
        print(f"wrote {options.output}")
    if options.timeline is not None:
        print(f"wrote {draw_timeline(list(engine.metrics.steps), options.timeline)}")
    print("\n".join(summary_lines(engine, outputs)), flush=True)


def _serve(options: argparse.Namespace, driver: Any, steer: Any) -> None:
    from megaring.rollout.loop import EngineLoop
    from megaring.rollout.server import Server, ServerConfig

    engine = _engine(options, driver, steer, max_waiting=options.max_waiting, keep_prefixes=options.keep_prefixes)
    loop = EngineLoop(engine)
    config = ServerConfig(options.host, options.port, options.model_name, options.request_seconds)
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, lambda *_: loop.stop())
    with Server(loop, config, engine.tokenizer) as server:
        print(f"serving {options.model_name} on http://{options.host}:{server.port}/v1/completions", flush=True)
        loop.run()
    print(f"served {engine.metrics.drawn:,} tokens in {len(engine.metrics.steps):,} steps", flush=True)
