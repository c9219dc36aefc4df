"""Rates of a machine that the cost model is fed with: measured once per machine, kept in a file, shown as a table."""

from __future__ import annotations

import json
import math
import os
import tempfile
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from buddyring.table import format_table
from megaring.errors import UserError


@dataclass(frozen=True)
class Constants:
    """theta of SPLASH, section 4.2, per rank: FLOP/s, bytes/s and seconds.

    ``link_bandwidth`` is what one rank receives in a collective. ``step_overhead`` is what a step costs beyond its
    stages. ``overlap`` (eta of equation 10) is the fraction of attention under which communication hides; 0 unless the
    engine pipelines them. Raises ValueError that names a constant which is not finite and positive (the last two may be
    0, and overlap is at most 1).
    """

    projection_flops: float
    attention_flops: float
    weight_bandwidth: float
    kv_bandwidth: float
    link_bandwidth: float
    collective_latency: float
    step_overhead: float = 0.0
    overlap: float = 0.0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            low_enough = value <= 1 if name == "overlap" else True
            least = value >= 0 if name in ("step_overhead", "overlap") else value > 0
            if not (math.isfinite(value) and least and low_enough):
                raise ValueError(f"{name} is {value}; {_RANGES.get(name, 'it is finite and above 0')}")


_RANGES = {"overlap": "it is a fraction of at most 1", "step_overhead": "it is finite and not negative"}
_UNITS = {
    "projection_flops": (1e12, "TFLOP/s", "in projections and MLPs"),
    "attention_flops": (1e12, "TFLOP/s", "in attention"),
    "weight_bandwidth": (1e9, "GB/s", "reading weights"),
    "kv_bandwidth": (1e9, "GB/s", "reading the KV cache"),
    "link_bandwidth": (1e9, "GB/s", "received by a rank in a collective"),
    "collective_latency": (1e-6, "us", "of one collective"),
    "step_overhead": (1e-3, "ms", "of a step beyond its stages"),
    "overlap": (1, "", "fraction of attention that hides communication"),
}


@dataclass(frozen=True)
class Calibration:
    """``constants`` of ``machine``.

    ``origin`` says how they were found and ``detail`` what there is to know about it; ``made`` is when, as an ISO date
    and time.
    """

    machine: str
    constants: Constants
    origin: str
    made: str = ""
    detail: str = ""

    def lines(self) -> list[str]:
        """The constants as a table, under a heading."""
        values = asdict(self.constants)
        table = format_table(
            ["constant", "value"], [[name, f"{value / _UNITS[name][0]:,.4g}"] for name, value in values.items()]
        )
        said = [f"{unit} {meaning}".strip() for _, unit, meaning in map(_UNITS.__getitem__, values)]
        heading = f"{self.machine}: {self.origin}" + (f" ({self.made})" if self.made else "")
        heading += f"; {self.detail}" if self.detail else ""
        rows = [f"{row}  {each}" for row, each in zip(table[1:], said, strict=True)]
        return [*textwrap.wrap(heading, 120), table[0], *rows]


def measure(machine: str, benchmarks: Mapping[str, Callable[[], float]]) -> Calibration:
    """Run one microbenchmark per constant, in the order of the fields; each returns its constant in SI units.

    ``step_overhead`` and ``overlap`` may be left out and are then 0. Raises ValueError that names a benchmark which is
    missing, unknown, or returns what a constant cannot be.
    """
    known = {field.name for field in fields(Constants)}
    unknown, missing = set(benchmarks) - known, known - set(benchmarks) - {"step_overhead", "overlap"}
    if unknown or missing:
        raise ValueError(
            "; ".join(
                f"{what} microbenchmarks: {', '.join(sorted(names))}"
                for what, names in (("missing", missing), ("unknown", unknown))
                if names
            )
        )
    values = {field.name: float(benchmarks[field.name]()) for field in fields(Constants) if field.name in benchmarks}
    made = datetime.now(UTC).isoformat(timespec="seconds")
    return Calibration(machine, Constants(**values), "measured by microbenchmarks", made)


def calibrated(machine: str, benchmarks: Mapping[str, Callable[[], float]], path: Path | None = None) -> Calibration:
    """The calibration of ``machine``: the one that is kept at ``path``, else measured now and kept there.

    Raises what ``load``, ``measure`` and ``save`` raise.
    """
    known = load(machine, path)
    if known is None:
        known = measure(machine, benchmarks)
        save(known, path)
    return known


def default_path() -> Path:
    """Where calibrations are kept unless a caller says otherwise."""
    return Path.home() / ".cache" / "megaring" / "rollout_calibration.json"


def save(calibration: Calibration, path: Path | None = None) -> Path:
    """Add ``calibration`` to the file at ``path``, in place of an earlier one of the same machine; its path.

    The file is replaced as a whole, so that a reader never sees half of it.
    """
    path = default_path() if path is None else path
    machines = _read(path) if path.exists() else {}
    machines[calibration.machine] = {key: value for key, value in asdict(calibration).items() if key != "machine"}
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
    try:
        with os.fdopen(handle, "w") as file:
            json.dump({"machines": machines}, file, indent=1)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    return path


def load(machine: str, path: Path | None = None) -> Calibration | None:
    """The calibration of ``machine`` in the file at ``path``, or None where there is none yet.

    Raises UserError for a file that is not one of ours.
    """
    return load_all(path).get(machine)


def load_all(path: Path | None = None) -> dict[str, Calibration]:
    """All calibrations in the file at ``path``, by machine. Raises UserError for a file that is not one of ours."""
    path = default_path() if path is None else path
    if not path.exists():
        return {}
    machines = _read(path)
    try:
        return {
            machine: Calibration(
                machine, Constants(**entry["constants"]), entry["origin"], entry["made"], entry["detail"]
            )
            for machine, entry in machines.items()
        }
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(
            f"calibration {path} has an entry that cannot be used ({error}); calibrate again, into a new file"
        ) from None


def _read(path: Path) -> dict[str, Any]:
    try:
        machines = json.loads(path.read_text())["machines"]
    except OSError as error:
        raise UserError(f"calibration {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        machines = None
    if not isinstance(machines, dict):
        raise UserError(f"{path} is not a calibration file; name one that a calibration wrote, or a new one")
    return machines
