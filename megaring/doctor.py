"""What this machine can run, and why not more. Imports nothing but the standard library.

Every package is looked at in a process of its own (``megaring.probes``), so that one that is broken, aborts or hangs is
reported like any other.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megaring.probes import PROBES

TIMEOUT = 180  # seconds for one probe; megatron alone takes 15 on a busy machine

# What a package is for, and how to get it.
PURPOSES = {
    "numba": ("placing sequences", "pip install numba"),
    "torch": ("everything but planning", "pip install torch"),
    "attention": ("attention across ranks", "it needs torch: pip install torch"),
    "nvrtc": ("compiling the GPU kernels", "it comes with torch; pip install cuda-bindings"),
    "megatron-core": ("training", "pip install 'megaring[train]'"),
    "psutil": ("saving checkpoints", "pip install 'megaring[train]'"),
    "pyyaml": ("--recipe files", "pip install 'megaring[train]'"),
    "tqdm": ("progress bars", "pip install 'megaring[train]'"),
    "datasets": ("preparing parquet and JSONL", "pip install 'megaring[train]'"),
    "tokenizers": ("tokenizer.json files", "pip install 'megaring[train]'"),
    "wandb": ("logging to Weights & Biases", "pip install 'megaring[train]'"),
    "matplotlib": ("pictures", "pip install 'megaring[plot]'"),
    "transformer-engine": ("fused layers and grouped experts on GPUs", "pip install 'megaring[hopper]'"),
    "flash-attn-3": ("the fastest local attention on Hopper", "build it from FlashAttention's hopper folder"),
    "flash-attn": ("faster local attention on GPUs", "pip install 'megaring[hopper]'"),
    "apex": ("fused optimizers on GPUs", "build it from github.com/NVIDIA/apex; the apex of PyPI is another package"),
}


@dataclass(frozen=True)
class Finding:
    """One package. state: ``ok``, ``missing``, ``broken``, ``old`` or ``unrelated`` (another package of that name).

    detail: what to know about it in one line. facts: what its probe reported besides.
    """

    name: str
    state: str
    version: str = ""
    detail: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def usable(self) -> bool:
        """Whether it can be used."""
        return self.state == "ok"


@dataclass(frozen=True)
class Verdict:
    """Whether a task can be done here. reasons: what stands against it, or limits it."""

    task: str
    possible: bool
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True)
class Report:
    """Everything ``megaring doctor`` has to say."""

    python: str
    machine: str
    findings: tuple[Finding, ...]
    verdicts: tuple[Verdict, ...]

    def possible(self, task: str) -> bool:
        """Whether ``task`` can be done."""
        return any(verdict.possible for verdict in self.verdicts if verdict.task == task)

    def to_json(self) -> str:
        """The report as one JSON object."""
        return json.dumps(asdict(self), indent=1)


def examine(timeout: float = TIMEOUT) -> Report:
    """Look at every package, and judge. Takes as long as importing them does."""
    with ThreadPoolExecutor(max_workers=max(1, os.cpu_count() or 1)) as workers:
        findings = dict(zip(PROBES, workers.map(lambda name: look(name, timeout), PROBES), strict=True))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return Report(
        python=platform.python_version(),
        machine=f"{platform.system()} {platform.machine()}, {cores} CPU cores",
        findings=tuple(findings.values()),
        verdicts=judge(findings),
    )


def look(name: str, timeout: float = TIMEOUT) -> Finding:
    """What the probe ``name`` finds, whatever becomes of its process."""
    root = str(Path(__file__).resolve().parent.parent)
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    try:
        # -P: a folder in the current directory that is named like a package is not that package.
        done = subprocess.run(
            [sys.executable, "-P", "-m", "megaring.probes", name],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            env={**os.environ, "PYTHONPATH": path},
        )
    except subprocess.TimeoutExpired:
        return Finding(name, "broken", detail=f"its import did not end within {timeout:g} s")
    answer = _last_object(done.stdout)
    if answer is None:
        end = f"signal {-done.returncode}" if done.returncode < 0 else f"status {done.returncode}"
        said = done.stderr.strip().splitlines()
        return Finding(
            name, "broken", detail=f"its import ended the process ({end})" + (f": {said[-1]}" if said else "")
        )
    return interpret(name, answer)


def _last_object(text: str) -> dict[str, Any] | None:
    lines = text.strip().splitlines()
    try:
        answer = json.loads(lines[-1]) if lines else None
    except ValueError:
        return None
    return answer if isinstance(answer, dict) and "state" in answer else None


def interpret(name: str, answer: Mapping[str, Any]) -> Finding:
    """A probe's answer as a finding."""
    purpose, remedy = PURPOSES[name]
    if answer["state"] == "missing":
        return Finding(name, "missing", detail=f"for {purpose}: {remedy}")
    if answer["state"] == "broken":
        return Finding(name, "broken", detail=answer["error"])
    facts = {key: value for key, value in answer.items() if key not in ("state", "version")}
    version = answer["version"]
    if name == "apex" and not facts["nvidia"]:
        return Finding(name, "unrelated", detail=f"this is the unrelated package of that name; {remedy}")
    least = least_versions().get(name)
    if least is not None and _as_numbers(version) < _as_numbers(least):
        return Finding(name, "old", version, f"at least {least} is needed: pip install '{name}>={least}'", facts)
    return Finding(name, "ok", version, _detail(name, facts), facts)


def _detail(name: str, facts: Mapping[str, Any]) -> str:
    if name == "torch":
        built = f"CUDA {facts['cuda_build']}" if facts["cuda_build"] else "CPU only"
        return f"built for {built}; NCCL {facts['nccl'] or 'no'}, gloo {'yes' if facts['gloo'] else 'no'}"
    if name == "nvrtc":
        compiles = "compiles" if facts["hopper"] else "does not compile"
        built = f"{facts['built']} of {facts['kernels']} kernels are built"
        hint = "" if facts["built"] == facts["kernels"] or not facts["hopper"] else " (megaring build makes the rest)"
        return f"NVRTC {facts['nvrtc']}, {compiles} for Hopper; {built}{hint}"
    if name == "apex":
        return "NVIDIA's" + ("" if facts["extensions"] else ", without its CUDA extensions")
    if name == "numba":
        return "a plan was made"
    return ""


def least_versions() -> dict[str, str]:
    """The least versions that this distribution asks for, by package; empty where it is not installed."""
    try:
        required = importlib.metadata.requires("megaring") or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    found = (re.match(r"([A-Za-z0-9_.-]+)\s*>=\s*([0-9.]+)", line) for line in required)
    return {match[1]: match[2] for match in found if match}


def _as_numbers(version: str) -> tuple[int, ...]:
    release = re.match(r"[0-9]+(\.[0-9]+)*", version)
    return tuple(int(part) for part in release[0].split(".")) if release else ()


def judge(findings: Mapping[str, Finding]) -> tuple[Verdict, ...]:
    """One verdict per task: plan, prepare data, train on CPU, train on GPU."""
    planning = _wanting(findings, "numba")
    formats = [
        f"no {name}: not for {PURPOSES[name][0]}" for name in ("datasets", "tokenizers") if not findings[name].usable
    ]
    training = _wanting(findings, "numba", "torch", "attention", "megatron-core", "psutil", "pyyaml", "tqdm")
    backends = findings["attention"].facts.get("backends", {})
    if backends and all(backends.values()):
        training.append("no attention backend runs: " + "; ".join(f"{k}: {why}" for k, why in backends.items()))
    facts = findings["torch"].facts if findings["torch"].usable else {}
    cpu = list(training)
    if facts and not facts["gloo"]:
        cpu.append("torch has no gloo")
    gpu = list(training)
    if facts and not facts["gpus"]:
        gpu.append(f"no GPU: {facts['no_gpu'] or 'none is visible'}")
    limits = ["torch has no NCCL, so on one GPU only"] if facts and not facts["nccl"] else []
    return (
        Verdict("plan", not planning, tuple(planning)),
        Verdict("prepare data", not planning, (*planning, *formats)),
        Verdict("train on CPU", not cpu, tuple(cpu)),
        Verdict("train on GPU", not gpu, tuple(gpu or limits)),
    )


def _wanting(findings: Mapping[str, Finding], *names: str) -> list[str]:
    return [
        f"{name} is {findings[name].state} ({findings[name].detail})" for name in names if not findings[name].usable
    ]


def report_lines(report: Report) -> list[str]:
    """The report as text: one line per thing, then one per task."""
    rows = [("machine", report.machine), ("python", report.python)]
    for finding in report.findings:
        state = finding.version if finding.usable else f"{finding.state} {finding.version}".strip()
        if finding.name == "attention" and finding.usable:
            rows += _attention_rows(finding.facts)
        else:
            rows.append((finding.name, f"{state}; {finding.detail}" if finding.detail else state))
        if finding.name == "torch":
            rows += _gpu_rows(finding.facts)
    lines = [f"{name:<21} {text}" for name, text in rows]
    lines.append("")
    for verdict in report.verdicts:
        answer = "yes" if verdict.possible else "no"
        lines.append(f"{verdict.task:<21} {answer}{': ' if verdict.reasons else ''}{'; '.join(verdict.reasons)}")
    return lines


def _gpu_rows(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows = []
    for index, gpu in enumerate(facts.get("gpus", [])):
        peers = f", reaches the memory of GPU {', '.join(map(str, gpu['peers']))}" if gpu["peers"] else ""
        text = f"{gpu['name']}, compute capability {gpu['capability']}, {gpu['memory_gib']} GiB{peers}"
        rows.append((f"GPU {index}", text))
    if facts.get("links"):
        rows.append(("GPU links", ", ".join(facts["links"])))
    if not rows and facts:
        rows.append(("GPU", f"none: {facts['no_gpu'] or 'none is visible'}"))
    return rows


def _attention_rows(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    kernels = facts["kernels"]
    local = next((name for name, why in kernels.items() if why is None), "none")
    faster = [f"not {name}: {why}" for name, why in itertools.takewhile(lambda kernel: kernel[1], kernels.items())]
    rows = [
        (f"attention: {name}", f"yes, on {facts['device']}" if why is None else f"no: {why}")
        for name, why in facts["backends"].items()
    ]
    return [*rows, ("  local kernel", f"{local}{' (' if faster else ''}{'; '.join(faster)}{')' if faster else ''}")]
