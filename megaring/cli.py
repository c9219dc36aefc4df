"""The ``megaring`` command. Imports neither torch nor megatron itself."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from megaring import build
from megaring.doctor import examine, report_lines
from megaring.errors import UserError
from megaring.rollout import cli as rollout


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="megaring", description="The megaring command.", allow_abbrev=False)
    commands = parser.add_subparsers(required=True, metavar="{doctor,build,rollout}")
    doctor = commands.add_parser(
        "doctor",
        help="say what this machine can run, and why not more",
        description="Say what this machine can run, and why not more. Exits with 0 if training on the CPU is possible.",
        allow_abbrev=False,
    )
    doctor.add_argument("--json", action="store_true", help="print one JSON object")
    doctor.set_defaults(run=_doctor)
    builder = commands.add_parser(
        "build",
        help="compile the GPU kernels ahead of their first use",
        description=build.DESCRIPTION,
        allow_abbrev=False,
    )
    build.add_arguments(builder)
    builder.set_defaults(run=build.run)
    worker = commands.add_parser(
        "rollout",
        help="plan and run generation whose attention layout changes while requests run",
        description=rollout.DESCRIPTION,
        allow_abbrev=False,
    )
    rollout.add_arguments(worker)
    options = parser.parse_args(arguments)
    try:
        status = options.run(options)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of our output has left: not an error, and no traceback at exit either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except UserError as error:
        print(f"megaring: error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"megaring: error: {error.filename or 'input or output'}: {error.strerror or error}", file=sys.stderr)
        return 2
    return status


def _doctor(options: argparse.Namespace) -> int:
    if sys.stderr.isatty():
        print("looking at every package; importing them takes a while ...", file=sys.stderr)
    report = examine()
    print(report.to_json() if options.json else "\n".join(report_lines(report)))
    return 0 if report.possible("train on CPU") else 1


if __name__ == "__main__":
    sys.exit(main())
