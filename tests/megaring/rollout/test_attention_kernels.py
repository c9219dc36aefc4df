"""The attention kernels without a GPU: interpreted on tiny shapes against fp64, and compiled for Hopper."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from paged_case import GQA, MLA_16, MLA_128

from megaring.errors import UserError
from megaring.rollout.attention.paged_gpu import chunk_tiling, decode_tiling, require_triton
from megaring.rollout.layout import PAGE

triton = pytest.importorskip("triton", reason="Triton is not installed")
SHARED_BYTES = 227 << 10  # of a block on Hopper
POINTERS = {
    "partial": "fp32",
    "partial_lse": "fp32",
    "out": "fp32",
    "lse": "fp32",
    "sources": "i64",
    **dict.fromkeys(("table", "lengths", "ends", "blocks", "segments", "units", "offsets"), "i32"),
}


def compile_for_hopper(kernel, constants, dtype, warps=4, stages=3):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types = POINTERS | {"queries": dtype, "cache": dtype, "entries": dtype}
    signature, aligned = {}, {}
    for place, name in enumerate(kernel.arg_names):
        if name in types:
            signature[name], aligned[place,] = f"*{types[name]}", [["tt.divisibility", 16]]
        else:
            signature[name] = "constexpr" if name in constants else "fp32" if name == "scale" else "i32"
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, places, aligned)
    options = {"num_warps": warps, "num_stages": stages}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def of_case(case, tiling):
    return {
        "HEADS": case.heads,
        "KV_HEADS": case.kv_heads,
        "GROUP_HEADS": case.kv_heads,
        "PLANES": case.planes,
        "MAIN": case.value_width,
        "REST": case.width - case.value_width,
        "PAGE": PAGE,
        "BLOCK_HEADS": tiling.heads,
        "BLOCK_MAIN": case.value_width,
        "BLOCK_REST": max(16, case.width - case.value_width),
        "TILE": tiling.tile,
        "STAGES": tiling.stages,
        "PRECISION": "ieee",
    }


def test_interpreted_kernels_equal_fp64():
    here = Path(__file__).parent
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([str(here), *sys.path])}
    script = str(here / "interpreted_kernels.py")
    run = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=200)
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout == "all equal\n"


@pytest.mark.parametrize(
    ("case", "dtype"), [(GQA, "bf16"), (GQA, "fp32"), (MLA_16, "bf16"), (MLA_128, "bf16")], ids=str
)
def test_decode_fits_on_hopper_as_often_as_its_tiling_says(case, dtype):
    from megaring.rollout.attention import paged_kernels

    tiling = decode_tiling(case.planes, case.value_width, case.heads // case.kv_heads, 4 if dtype == "fp32" else 2)
    constants = of_case(case, tiling) | {"BLOCK_ROWS": 256}
    made = compile_for_hopper(paged_kernels.decode_kernel, constants, dtype, tiling.warps, tiling.stages)
    assert made.metadata.shared * tiling.programs <= SHARED_BYTES
    assert "cp.async" in made.asm["ptx"]  # the loads of the next pages run beside the work on this one


def test_the_other_kernels_compile_for_hopper():
    from megaring.rollout.attention import paged_kernels

    for case in (GQA, MLA_16):
        tiling = chunk_tiling(case.value_width, case.heads // case.kv_heads, 2)
        lanes = 128 if case.value_width <= 128 else 64
        constants = of_case(case, tiling) | {"BLOCK_TOKENS": lanes // tiling.heads}
        made = compile_for_hopper(paged_kernels.chunk_kernel, constants, "bf16", tiling.warps, tiling.stages)
        assert made.metadata.shared <= SHARED_BYTES
        assert "wgmma" in made.asm["ptx"]
    combine = {"HEADS": 32, "MAIN": 128, "BLOCK": 128, "PIECES": 32}
    assert compile_for_hopper(paged_kernels.combine_kernel, combine, "bf16").asm["cubin"]
    append = {"GROUPS": 2, "GROUP_HEADS": 2, "PLANES": 2, "WIDTH": 128, "PAGE": PAGE, "BLOCK": 128}
    assert compile_for_hopper(paged_kernels.append_kernel, append, "bf16").asm["cubin"]


def test_a_gpu_without_triton_is_refused_with_the_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(UserError, match=r"needs Triton.*pip install triton"):
        require_triton()


def test_types_and_widths_that_the_kernels_do_not_have_are_named():
    from megaring.rollout.attention.paged_gpu import decode

    cache, table = torch.zeros(2, 2, 1, 64, 16), torch.zeros(1, 1, 1, dtype=torch.int32)
    ones = torch.ones(1, dtype=torch.int32)
    for queries, value_width, error, message in (
        (torch.zeros(1, 4, 16).bfloat16(), 16, TypeError, "queries are torch.bfloat16 and the cache torch.float32"),
        (torch.zeros(1, 4, 8), 16, ValueError, "queries have 8 elements, entries 16"),
        (torch.zeros(1, 4, 16), 12, ValueError, "values of their own plane have 16 elements, not 12"),
        (torch.zeros(4, 4, 16).transpose(0, 1)[:1, :, :], 16, ValueError, "contiguous"),
    ):
        with pytest.raises(error, match=message):
            decode(queries, cache, table, ones, ones, scale=1.0, value_width=value_width)
