"""The results file of ``benchmark_training.py``: written after every run, and read again to resume."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any


class ResultsError(Exception):
    """A machine or a results file that a benchmark cannot go on with."""


@dataclass(frozen=True)
class Machine:
    """Where runs are made. gpu: its name, None for CPUs. The others: versions."""

    gpu: str | None
    torch: str
    megatron_core: str
    python: str


@dataclass(frozen=True)
class Settings:
    """What all runs of a file have in common; runs of other settings do not belong in it."""

    recipe: str
    steps: int
    token_budget: int
    extra: tuple[str, ...]
    machine: Machine


@dataclass(frozen=True)
class Row:
    """One run. Speeds are medians over the steps after the warm-up.

    date: when it ended. losses: of every step. loss_difference: the largest relative difference of a step's loss to the
    run on one rank, None as long as there is none. error: why it failed, None where it did not.
    """

    lengths: str
    gpus: int
    scheduler: str
    date: str
    steps: int
    tokens_per_s: float | None
    step_s: float | None
    mfu: float | None
    memory_gib: float | None
    token_imbalance: float | None
    attention_imbalance: float | None
    first_loss: float | None
    last_loss: float | None
    loss_difference: float | None
    losses: tuple[float, ...]
    error: str | None


@dataclass
class Results:
    """The rows of one file. ``add`` writes it anew, whole or not at all. commands: those that made the rows."""

    path: Path
    settings: Settings
    commands: list[str]
    rows: list[Row]

    @classmethod
    def open(cls, path: Path, settings: Settings, command: str, *, resume: bool) -> Results:
        """The results in ``path``, none yet if there is no such file.

        Raises ResultsError when there is one and ``resume`` is false, or when its runs have other settings.
        """
        if not path.exists():
            return cls(path, settings, [command], [])
        if not resume:
            raise ResultsError(f"{path} exists: give --resume to add what it lacks, or choose another --output")
        try:
            data = json.loads(path.read_text())
            there = data["settings"]
            rows = [Row(**{**row, "losses": tuple(row["losses"])}) for row in data["rows"]]
            commands = [*data["commands"], command]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ResultsError(f"{path} is not a file of this script ({error!r}); choose another --output") from error
        for name, value in _plain(settings).items():
            if there.get(name) != value:
                raise ResultsError(
                    f"{path} holds runs with {name} {there.get(name)}, this is {value}: choose another --output"
                )
        return cls(path, settings, commands, rows)

    def finished(self, lengths: str, gpus: int, scheduler: str) -> Row | None:
        """The row of a run that ended well, if it is there."""
        key = (lengths, gpus, scheduler)
        return next((r for r in self.rows if (r.lengths, r.gpus, r.scheduler) == key and not r.error), None)

    def add(self, row: Row) -> None:
        """Take in the row of a run that has just ended, in place of an earlier one of that run, and write the file."""
        key = (row.lengths, row.gpus, row.scheduler)
        self.rows = [each for each in self.rows if (each.lengths, each.gpus, each.scheduler) != key] + [row]
        data = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "commands": self.commands,
            "settings": _plain(self.settings),
            "rows": [asdict(each) for each in self.rows],
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_name(f"{self.path.name}.partial")
        partial.write_text(json.dumps(data, indent=1) + "\n")
        os.replace(partial, self.path)


def _plain(settings: Settings) -> dict[str, Any]:
    """As JSON gives it back."""
    return json.loads(json.dumps(asdict(settings)))


def this_machine() -> tuple[Machine, int]:
    """This machine and its number of GPUs. Raises ResultsError where torch cannot be used.

    Another process looks: this one must not hold memory of a GPU.
    """
    look = [sys.executable, "-m", "megaring.probes", "torch"]
    done = subprocess.run(look, capture_output=True, text=True, timeout=300)
    facts = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {"error": done.stderr[-500:]}
    if facts.get("state") != "ok":
        raise ResultsError(f"torch cannot be used here: {facts.get('error', facts.get('state'))}")
    machine = Machine(
        gpu=facts["gpus"][0]["name"] if facts["gpus"] else None,
        torch=facts["version"],
        megatron_core=importlib.metadata.version("megatron-core"),
        python=platform.python_version(),
    )
    return machine, len(facts["gpus"])
