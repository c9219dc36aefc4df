"""Machine code of a cubin, read with the disassembler that Triton's package carries."""

from __future__ import annotations

import functools
import importlib.util
import re
import subprocess
from pathlib import Path

import pytest


def disassemble(cubin: bytes, folder: Path) -> list[str]:
    """Instructions in program order, without addresses; skips the test where there is no disassembler."""
    return [match[1].strip() for match in re.finditer(r"/\*[0-9a-f]{4,5}\*/\s+(.*?);", _text(cubin, folder))]


@functools.lru_cache(maxsize=1)  # a test reads one cubin several times
def _text(cubin: bytes, folder: Path) -> str:
    spec = importlib.util.find_spec("triton")
    tool = Path(spec.origin).parent / "backends/nvidia/bin/nvdisasm" if spec and spec.origin else None
    if tool is None or not tool.exists():
        pytest.skip("nvdisasm is not here: it comes with the triton package")
    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    return subprocess.run([tool, "-c", path], capture_output=True, text=True, check=True, timeout=60).stdout


def reachable(cubin: bytes, folder: Path, start: str) -> list[str]:
    """Instructions that can follow the one that begins with ``start``, which a program holds once, itself included.

    Roles are told apart by where their code leads, since the compiler lays blocks out as it likes.
    """
    lines = _text(cubin, folder).splitlines()
    code, labels = [], {}
    for line in lines:
        if match := re.match(r"\s*(\.L_x_\d+|\$\S+):", line):
            labels[match[1]] = len(code)
        elif match := re.search(r"/\*[0-9a-f]{4,5}\*/\s+(.*?);", line):
            code.append(match[1].strip())
    (first,) = (i for i, line in enumerate(code) if line.startswith(start))
    seen, ahead = set(), [first]
    while ahead:
        at = ahead.pop()
        if at in seen or at >= len(code):
            continue
        seen.add(at)
        word = code[at].split()[0]  # the predicate, where there is one
        assert not re.search(r"\b(BRX|JMX?|JMP)\b", code[at]), f"a jump that this walk does not follow: {code[at]}"
        if re.search(r"\b(BRA|CALL)", code[at]):
            ahead += [labels[target] for target in re.findall(r"`\((.*?)\)", code[at])]
        if not word.startswith(("BRA", "EXIT", "RET")):
            ahead.append(at + 1)
    return [code[i] for i in sorted(seen)]


def most_registers(code: list[str]) -> int:
    """Registers that the instructions name, counting from R0."""
    return 1 + max((int(number) for line in code for number in re.findall(r"\bR(\d+)\b", line)), default=-1)
