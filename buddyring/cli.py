"""The ``buddyring`` command: plan the placement of a list of sequence lengths, or compare the schedulers on it."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from buddyring import SCHEDULERS, Placement, plan
from buddyring.distributions import NAMES, batch
from buddyring.draw import DrawingError, draw_placement
from buddyring.read_lengths import LengthsError, read_lengths
from buddyring.report import bar_lines, summary_lines
from buddyring.steps import OVERLONG, WINDOW, fit_length, split_steps
from buddyring.table import COMPARE_HEADER, Summary, compare_row, format_table, summarise, timed

_EPILOG = f"""\
LENGTHS is a text file with one integer per line, JSON lines with --field, or the .idx of a Megatron dataset (document
lengths); - reads standard input. Instead of it, --distribution with --tokens makes lengths: {", ".join(NAMES)}
(stdlib: the real byte lengths of this Python's own source files; the others are log-normal stand-ins).

With --token-budget the list becomes steps of at most so many tokens, filled first-fit over a window of {WINDOW} waiting
sequences. A last step that holds less than half of the budget is left out.
"""


class CommandError(Exception):
    """Options or lengths that cannot be planned; printed as one line."""


@dataclass(frozen=True, eq=False)
class Steps:
    """Lengths cut into steps. ``members`` are indices into ``lengths`` (tokens), ``left_out`` tokens are in no step."""

    lengths: np.ndarray
    members: list[list[int]]
    left_out: int

    def step(self, index: int) -> list[int]:
        """The lengths of one step."""
        return self.lengths[self.members[index]].tolist()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    options = build_parser().parse_args(arguments)
    if sys.stdout is None:
        return _fail("standard output is closed; send it to a file or to /dev/null")
    try:
        options.run(options)
        sys.stdout.flush()
    except (CommandError, LengthsError, DrawingError) as error:
        return _fail(str(error))
    except BrokenPipeError:  # the reader of our output has left: not an error, and no traceback at exit either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        return _fail(f"{error.filename or 'input or output'}: {error.strerror or error}")
    except KeyboardInterrupt:
        return 130
    return 0


def _fail(message: str) -> int:
    print(f"buddyring: error: {message}", file=sys.stderr)
    return 2


def build_parser() -> argparse.ArgumentParser:
    """The parser of the command and its two subcommands."""
    parser = argparse.ArgumentParser(
        prog="buddyring",
        description="Plan the placement of a list of sequence lengths, or compare the schedulers on it.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(required=True, metavar="{plan,compare}")
    plan_command = _add_command(commands, "plan", _run_plan, "place the sequences and show the load of every rank")
    group = plan_command.add_argument_group("scheduler and output")
    group.add_argument("--cp-scheduler", choices=SCHEDULERS, default="buddyring", help="default: %(default)s")
    group.add_argument("--step", type=int, default=0, metavar="N", help="which step to show and draw; default: 0")
    group.add_argument("--json", metavar="FILE", help="write every step's placement; - prints it in place of the text")
    group.add_argument("--plot", metavar="FILE", help="draw the step's placement (.png, .svg, .pdf); needs matplotlib")
    compare_command = _add_command(commands, "compare", _run_compare, "print a table of all schedulers")
    compare_command.add_argument("--json", metavar="FILE", help="write the table; - prints it in place of the text")
    return parser


def _add_command(commands, name: str, run, text: str) -> argparse.ArgumentParser:
    command = commands.add_parser(
        name,
        help=text,
        description=f"{text[0].upper()}{text[1:]}.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    command.set_defaults(run=run)
    group = command.add_argument_group("lengths")
    group.add_argument("lengths", nargs="?", metavar="LENGTHS", help="file of lengths; - for standard input")
    group.add_argument("--field", metavar="NAME", help="JSON lines: the field with a length or a list of token ids")
    group.add_argument("--distribution", choices=NAMES, help="make lengths in place of reading them")
    group.add_argument("--tokens", type=int, metavar="N", help="how many tokens to make")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of --distribution; default: 0")
    group.add_argument("--token-budget", type=int, metavar="N", help="most tokens of a step; default: all in one step")
    group.add_argument("--seq-length", type=int, metavar="N", help="longest sequence; default: the token budget")
    group.add_argument(
        "--overlong", choices=OVERLONG, default="error", help="what to do with longer ones; default: error"
    )
    group = command.add_argument_group("planning")
    group.add_argument("--ranks", type=int, required=True, metavar="N", help="ranks of the context-parallel domain")
    group.add_argument("--token-tolerance", type=float, default=0.10, metavar="X", help="default: 0.10")
    group.add_argument("--attention-tolerance", type=float, default=0.05, metavar="X", help="default: 0.05")
    group.add_argument("--max-group", type=int, default=8, metavar="N", help="most ranks of a sequence; default: 8")
    group.add_argument("--capacity", type=int, metavar="N", help="most tokens of a rank; default: no limit")
    group.add_argument("--rank-multiple", type=int, default=1, metavar="N", help="round a rank's tokens up; default: 1")
    group.add_argument("--tile", type=int, default=128, metavar="N", help="tokens that stay together; default: 128")
    group.add_argument(
        "--exact-tiles", action="store_true", help="split only where 2 x tile x ranks divides the length"
    )
    group.add_argument("--target", type=int, metavar="N", help="tokens a rank, megatron only; default: half the mean")
    return command


def _planning_options(options: argparse.Namespace, scheduler: str) -> dict:
    return {
        "scheduler": scheduler,
        "token_tolerance": options.token_tolerance,
        "attention_tolerance": options.attention_tolerance,
        "max_group": options.max_group,
        "capacity": options.capacity,
        "rank_multiple": options.rank_multiple,
        "tile": options.tile,
        "exact_tiles": options.exact_tiles,
        "target": options.target if scheduler == "megatron" else None,
    }


def _load_lengths(options: argparse.Namespace) -> np.ndarray:
    if (options.lengths is None) == (options.distribution is None):
        raise CommandError("give either a file of lengths or --distribution")
    if options.distribution is None:
        if options.tokens is not None:
            raise CommandError("--tokens goes with --distribution; a file of lengths is taken whole")
        found = read_lengths(options.lengths, options.field)
        if found.empty:
            print(f"buddyring: {found.source}: {found.empty:,} empty documents left out", file=sys.stderr)
        return found.lengths
    if options.field is not None:
        raise CommandError("--field goes with a file of JSON lines, not with --distribution")
    if options.tokens is None:
        raise CommandError("--distribution needs --tokens, the tokens to make")
    if not 1 <= options.tokens <= 2**36:
        raise CommandError(f"--tokens is {options.tokens}; it may be 1 to {2**36}")
    try:
        return np.asarray(batch(options.distribution, options.tokens, seed=options.seed), dtype=np.int64)
    except (ValueError, FileNotFoundError) as error:
        raise CommandError(str(error)) from error


def _load_steps(options: argparse.Namespace) -> Steps:
    lengths = _load_lengths(options)
    budget = int(lengths.sum()) if options.token_budget is None else options.token_budget
    longest = options.seq_length if options.seq_length is not None else budget
    for name, value in (("--token-budget", budget), ("--seq-length", longest)):
        if value < 1:
            raise CommandError(f"{name} is {value}; it must be at least 1")
    if longest > budget:
        raise CommandError(
            f"--seq-length {longest} is over --token-budget {budget}: no step could hold such a sequence"
        )
    try:
        lengths = fit_length(lengths, longest, options.overlong)
    except ValueError as error:
        raise CommandError(f"{error} (--overlong truncate, --overlong split, --seq-length)") from error
    members = split_steps(lengths, budget)
    left_out = 0
    if len(members) > 1:
        last = int(lengths[members[-1]].sum())
        if 2 * last < budget:
            left_out = last
            members.pop()
    return Steps(lengths, members, left_out)


def _plan_step(steps: Steps, index: int, options: argparse.Namespace, scheduler: str) -> tuple[Placement, float]:
    try:
        return timed(plan, steps.step(index), options.ranks, **_planning_options(options, scheduler))
    except (ValueError, TypeError) as error:
        raise CommandError(f"step {index}: {error}" if len(steps.members) > 1 else str(error)) from error


def _plan_all(steps: Steps, options: argparse.Namespace, scheduler: str) -> tuple[list[Placement], list[float]]:
    _plan_step(steps, 0, options, scheduler)  # the first call loads compiled code; it is not timed
    planned = [_plan_step(steps, index, options, scheduler) for index in range(len(steps.members))]
    return [placement for placement, _ in planned], [took for _, took in planned]


def _run_plan(options: argparse.Namespace) -> None:
    if options.target is not None and options.cp_scheduler != "megatron":
        raise CommandError("--target goes with --cp-scheduler megatron")
    steps = _load_steps(options)
    if not 0 <= options.step < len(steps.members):
        raise CommandError(f"--step {options.step}: there are steps 0 to {len(steps.members) - 1}")
    placements, times = _plan_all(steps, options, options.cp_scheduler)
    shown = placements[options.step]
    if options.plot is not None:
        draw_placement(shown, options.plot)
    if options.json is not None:
        made = [
            {"sequences": members, "planning_ms": took, "placement": json.loads(placement.to_json())}
            for members, placement, took in zip(steps.members, placements, times, strict=True)
        ]
        _write_json(options.json, {"summary": asdict(summarise(placements, times)), "steps": made})
        if options.json == "-":
            return
    lines = summary_lines(shown, times[options.step])
    if len(placements) > 1:
        over_all = _steps_lines(steps, summarise(placements, times), placements)
        lines = [*over_all, "", f"step {options.step}: {lines[0]}", *lines[1:]]
    width = shutil.get_terminal_size(fallback=(100, 24)).columns
    print("\n".join([*lines, "", *bar_lines(shown, width, _block(), sys.stdout.isatty())]))
    if options.plot is not None:
        print(f"\npicture in {options.plot}")


def _steps_lines(steps: Steps, s: Summary, placements: list[Placement]) -> list[str]:
    worst = max(range(len(placements)), key=lambda i: placements[i].violation)
    return [
        _steps_heading(steps),
        f"tokens        {s.token_mean:.2%} from the mean on average, {s.token_worst:.2%} at worst",
        f"attention     {s.attention_mean:.2%} from the mean on average, {s.attention_worst:.2%} at worst",
        f"tolerances    both met in {s.within:.1%} of the steps"
        + (f"; furthest outside in step {worst}" if placements[worst].violation else ""),
        f"group sizes   mixed in {s.mixed:.1%} of the steps",
        "planning      {:.2f} ms median, {:.2f} ms p95, {:.2f} ms most".format(*s.planning_ms),
    ]


def _steps_heading(steps: Steps) -> str:
    totals = [int(steps.lengths[members].sum()) for members in steps.members]
    count = sum(len(members) for members in steps.members)
    text = f"{len(totals):,} step{'s' * (len(totals) != 1)}, {count:,} sequences, {np.mean(totals):,.0f} tokens a step"
    return text + (f" (the last {steps.left_out:,} are left out)" if steps.left_out else "")


def _run_compare(options: argparse.Namespace) -> None:
    steps = _load_steps(options)
    summaries, refused = [], {}
    for scheduler in SCHEDULERS:
        try:
            placements, times = _plan_all(steps, options, scheduler)
        except CommandError as error:
            refused[scheduler] = str(error)
            continue
        summaries.append(summarise(placements, times))
    if not summaries:
        raise CommandError(next(iter(refused.values())))
    if options.json is not None:
        _write_json(options.json, {"schedulers": [asdict(s) for s in summaries], "refused": refused})
        if options.json == "-":
            return
    lines = [
        f"{_steps_heading(steps)}, on {options.ranks:,} ranks",
        "tokens, attention: how far the furthest rank is from the mean; the other figures are means over the steps",
        "",
    ]
    lines += format_table(COMPARE_HEADER, map(compare_row, summaries))
    lines += [f"{scheduler} refused: {why}" for scheduler, why in refused.items()]
    print("\n".join(lines))


def _write_json(path: str, data: dict) -> None:
    text = json.dumps(data, indent=1)
    if path == "-":
        print(text)
    else:
        Path(path).write_text(text + "\n")


def _block() -> str:
    try:
        "█".encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return "#"
    return "█"


if __name__ == "__main__":
    sys.exit(main())
