"""CUDA C++ to cubin through NVRTC, which torch brings along: no compiler and no GPU needed, and a cache on disk.

A cubin's key is made of the sources, the options and NVRTC's version, and of no path, so every checkout of the same
sources shares it. Whoever compiles holds the key's lock, writes into a temporary file and renames it, so that of many
ranks one compiles and none reads half a file.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path

from megaring.kernels.specialisations import Specialisation

ARCHITECTURE = "sm_90a"
# Without NVRTC's own cache, which would answer a repeated compilation with a cubin but no log to read.
OPTIONS = (f"--gpu-architecture={ARCHITECTURE}", "--std=c++20", "-default-device", "--ptxas-options=-v", "--no-cache")
LOCK_SECONDS = 300.0


class CompileError(RuntimeError):
    """NVRTC is missing or refused a source; the message holds its log."""


@dataclass(frozen=True)
class Report:
    """What the compiler says about one kernel.

    registers: per thread. spill_stores, spill_loads, stack: bytes. notes: lines about serialised matrix products or
    ignored register quotas (``C75..``), each of which means a kernel slower than its source says.
    """

    registers: int
    spill_stores: int
    spill_loads: int
    stack: int
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Built:
    """A compiled specialisation. cached: whether it was there already; seconds: time spent compiling it."""

    specialisation: Specialisation
    cubin: bytes
    report: Report
    cached: bool
    seconds: float


def default_cache() -> Path:
    """Where cubins are kept unless a caller names another folder."""
    return Path.home() / ".cache" / "megaring" / "kernels"


def build(specialisation: Specialisation, *, folder: Path | None = None, lock_seconds: float = LOCK_SECONDS) -> Built:
    """The cubin of ``specialisation``, from the cache in ``folder`` or compiled into it.

    Raises CompileError when the source does not compile or NVRTC is missing, TimeoutError when another process holds
    the lock of this key for longer than ``lock_seconds``.
    """
    folder = default_cache() if folder is None else folder
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{cache_key(specialisation)}.cubin"
    if (found := _read(path)) is not None:
        return Built(specialisation, found[0], parse_log(found[1]), cached=True, seconds=0.0)
    with _locked(path.with_suffix(".lock"), lock_seconds):
        if (found := _read(path)) is not None:
            return Built(specialisation, found[0], parse_log(found[1]), cached=True, seconds=0.0)
        start = time.perf_counter()
        cubin, log = compile_cubin(specialisation)
        seconds = time.perf_counter() - start
        _write(path.with_suffix(".log"), log.encode())
        _write(path, cubin)  # last: its presence says that both are there
    return Built(specialisation, cubin, parse_log(log), cached=False, seconds=seconds)


def is_built(specialisation: Specialisation, *, folder: Path | None = None) -> bool:
    """Whether the cubin is in the cache already. Raises CompileError when NVRTC cannot be loaded."""
    folder = default_cache() if folder is None else folder
    return (folder / f"{cache_key(specialisation)}.cubin").exists()


def cache_key(specialisation: Specialisation) -> str:
    """Hash of everything that decides the cubin."""
    digest = hashlib.sha256()
    parts = [specialisation.source, *_options(specialisation), "nvrtc", *map(str, nvrtc_version())]
    for name, text in sorted(headers().items()):
        parts += [name, text]
    for part in [*parts, source(specialisation.source)]:
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def compile_cubin(specialisation: Specialisation) -> tuple[bytes, str]:
    """Compile without any cache: (cubin, log). Raises CompileError."""
    nvrtc = _nvrtc()
    included = headers()
    text = source(specialisation.source).encode()
    program = _checked(
        nvrtc.nvrtcCreateProgram(
            text,
            specialisation.source.encode(),
            len(included),
            [value.encode() for value in included.values()],
            [name.encode() for name in included],
        )
    )
    try:
        options = [option.encode() for option in _options(specialisation)]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        log = bytes(_checked(nvrtc.nvrtcGetProgramLogSize(program)))
        _checked(nvrtc.nvrtcGetProgramLog(program, log))
        log_text = log.rstrip(b"\0").decode(errors="replace")
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise CompileError(f"{specialisation.label} does not compile for {ARCHITECTURE}:\n{log_text}")
        cubin = bytes(_checked(nvrtc.nvrtcGetCUBINSize(program)))
        _checked(nvrtc.nvrtcGetCUBIN(program, cubin))
        return cubin, log_text
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def parse_log(log: str) -> Report:
    """The figures of a log that ``--ptxas-options=-v`` made: the worst of all kernels in it.

    Raises ValueError when it lacks them.
    """
    used = [int(count) for count in re.findall(r"Used (\d+) registers", log)]
    spills = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
    if not used or not spills:
        raise ValueError(f"the compiler's log does not tell registers and spills:\n{log}")
    stack, stores, loads = (max(int(count) for count in column) for column in zip(*spills, strict=True))
    notes = tuple(line.strip() for line in log.splitlines() if re.search(r"\(C75\d\d\)", line))
    return Report(max(used), stores, loads, stack, notes)


@cache
def source(name: str) -> str:
    """A file of ``csrc``, by its path under it."""
    return (resources.files("megaring") / "csrc" / name).read_text()


@cache
def headers() -> dict[str, str]:
    """All headers of ``csrc``, by the name that sources include them under."""
    folder = resources.files("megaring") / "csrc"
    return {item.name: item.read_text() for item in folder.iterdir() if item.name.endswith(".cuh")}


@cache
def nvrtc_version() -> tuple[int, int]:
    """NVRTC's version. Raises CompileError when it cannot be loaded."""
    try:
        status, major, minor = _nvrtc().nvrtcVersion()
    except RuntimeError as error:
        raise CompileError(f"NVRTC cannot be loaded ({error}); torch for CUDA brings nvidia-cuda-nvrtc") from error
    if int(status) != 0:
        raise CompileError(f"NVRTC does not tell its version: {status}")
    return major, minor


def _options(specialisation: Specialisation) -> list[str]:
    return [*OPTIONS, *(f"-D{name}={value}" for name, value in specialisation.defines)]


def _nvrtc():
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise CompileError("cuda-bindings is missing; torch for CUDA depends on it, torch for CPU does not") from error
    return nvrtc


def _checked(result: tuple):
    status, *values = result
    if int(status) != 0:
        raise CompileError(f"NVRTC failed: {status}")
    return values[0] if values else None


def _read(path: Path) -> tuple[bytes, str] | None:
    try:
        return path.read_bytes(), path.with_suffix(".log").read_text()
    except FileNotFoundError:
        return None


def _write(path: Path, data: bytes) -> None:
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.stem, delete=False) as file:
        file.write(data)
    os.replace(file.name, path)


@contextlib.contextmanager
def _locked(path: Path, seconds: float) -> Iterator[None]:
    """Hold the file lock of one key, which the system frees when its holder dies."""
    deadline = time.monotonic() + seconds
    with open(path, "w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"another process has held {path} for {seconds:.0f} s; end it, then try again"
                    ) from None
                time.sleep(0.05)
        yield
