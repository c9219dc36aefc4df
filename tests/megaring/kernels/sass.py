"""Machine code of a cubin, read with the disassembler that Triton's package carries."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from pathlib import Path

import pytest


def disassemble(cubin: bytes, folder: Path) -> list[str]:
    """Instructions in program order, without addresses; skips the test where there is no disassembler."""
    spec = importlib.util.find_spec("triton")
    tool = Path(spec.origin).parent / "backends/nvidia/bin/nvdisasm" if spec and spec.origin else None
    if tool is None or not tool.exists():
        pytest.skip("nvdisasm is not here: it comes with the triton package")
    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    text = subprocess.run([tool, "-c", path], capture_output=True, text=True, check=True, timeout=60).stdout
    return [match[1].strip() for match in re.finditer(r"/\*[0-9a-f]{4,5}\*/\s+(.*?);", text)]


def most_registers(code: list[str]) -> int:
    """Registers that the instructions name, counting from R0."""
    return 1 + max((int(number) for line in code for number in re.findall(r"\bR(\d+)\b", line)), default=-1)
