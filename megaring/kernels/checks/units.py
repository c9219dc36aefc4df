"""Each device layer alone against torch, so that a fault of the whole kernel can be told from one of its parts."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from megaring.kernels.arguments import TensorMap
from megaring.kernels.driver import Kernel, load, tensor_map
from megaring.kernels.specialisations import Specialisation, unit_kernels

Check = tuple[str, float, float]  # what, relative error, the largest allowed


def unit_checks(folder: Path | None = None) -> Iterator[tuple[str, Callable[[], list[Check]]]]:
    """(name, function that runs the checks) per unit kernel."""
    by_function = {
        "unit_tma_2d": _tma_2d,
        "unit_tma_3d": _tma_3d,
        "unit_wgmma_ss": _wgmma_ss,
        "unit_wgmma_rs": _wgmma_rs,
        "unit_registers": _registers,
        "unit_softmax": _softmax,
        "unit_signal": _signal,
    }
    for each in unit_kernels():

        def run(each: Specialisation = each) -> list[Check]:
            return by_function[each.function](load(each, torch.cuda.current_device(), folder))

        yield each.label, run


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """L2 norm of the difference over that of ``wanted``; NaN or infinity when ``found`` holds any."""
    wanted = wanted.double()
    scale = wanted.norm().item()
    return (found.double() - wanted).norm().item() / (scale if scale else 1.0)


def _map(tensor: torch.Tensor) -> ctypes.Array:
    return TensorMap.from_buffer_copy(tensor_map(tensor))


def _pointer(tensor: torch.Tensor) -> ctypes.c_uint64:
    return ctypes.c_uint64(tensor.data_ptr())


def _values(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def _tma_2d(kernel: Kernel) -> list[Check]:
    tensor = _values(300, 128)
    checks = []
    for column, row in ((0, 0), (64, 37), (0, 200)):
        out = torch.full((128, 64), float("nan"), dtype=tensor.dtype, device="cuda")
        kernel.launch(1, 128, [_map(tensor), _pointer(out), ctypes.c_int(column), ctypes.c_int(row)])
        wanted = torch.zeros_like(out)
        part = tensor[row : row + 128, column : column + 64]
        wanted[: len(part)] = part
        checks.append((f"box at row {row}, column {column}", relative_error(out, wanted), 0.0))
    return checks


def _tma_3d(kernel: Kernel) -> list[Check]:
    whole = _values(300, 3, 5, 128)
    checks = []
    for tensor, what in ((whole[:, 1], "strided"), (_values(200, 1, 64), "one head"), (_values(7, 2, 128), "few rows")):
        row, head = min(3, len(tensor) - 1), tensor.shape[1] - 1
        column = tensor.shape[2] - 64
        out = torch.full((128, 64), float("nan"), dtype=tensor.dtype, device="cuda")
        places = [ctypes.c_int(column), ctypes.c_int(head), ctypes.c_int(row)]
        kernel.launch(1, 128, [_map(tensor), _pointer(out), *places])
        wanted = torch.zeros_like(out)
        part = tensor[row : row + 128, head, column:]
        wanted[: len(part)] = part
        checks.append((what, relative_error(out, wanted), 0.0))
    return checks


def _choices(kernel: Kernel) -> tuple[int, torch.dtype]:
    defines = dict(kernel.specialisation.defines)
    return defines["MEGARING_HEAD_DIM"], torch.bfloat16 if defines["MEGARING_BFLOAT16"] else torch.float16


def _wgmma_ss(kernel: Kernel) -> list[Check]:
    head_dim, dtype = _choices(kernel)
    query, key = _values(128, head_dim, dtype=dtype), _values(128, head_dim, dtype=dtype)
    out = torch.full((128, 128), float("nan"), device="cuda")
    kernel.launch(1, 256, [_map(query), _map(key), _pointer(out)])
    wanted = query.double() @ key.double().T
    return [("Q K^T", relative_error(out, wanted), 1e-5)]


def _wgmma_rs(kernel: Kernel) -> list[Check]:
    head_dim, dtype = _choices(kernel)
    value = _values(128, head_dim, dtype=dtype)
    probabilities = torch.rand(64, 128, device="cuda").to(dtype).float()
    out = torch.full((64, head_dim), float("nan"), device="cuda")
    kernel.launch(1, 128, [_map(value), _pointer(probabilities), _pointer(out)])
    return [("P V", relative_error(out, probabilities.double() @ value.double()), 1e-5)]


def _registers(kernel: Kernel) -> list[Check]:
    given = torch.randn(384, device="cuda")
    out = torch.full((384,), float("nan"), device="cuda")
    rounds = 5
    kernel.launch(1, 384, [_pointer(out), _pointer(given), ctypes.c_int(rounds)])
    index = torch.arange(176, device="cuda", dtype=torch.float64)
    values = given.double()[128:, None] + index.roll(-rounds)
    wanted = torch.cat([given[:128].double(), values @ index])
    return [("sums", relative_error(out, wanted), 1e-5)]


def _softmax(kernel: Kernel) -> list[Check]:
    checks = []
    for tiles, limit, diagonal in ((1, 128, 0), (3, 128, 0), (2, 70, 0), (3, 128, 1), (2, 45, 1)):
        scores = 8 * torch.randn(tiles, 64, 128, device="cuda")
        out, lse = torch.full((64, 128), float("nan"), device="cuda"), torch.full((64,), float("nan"), device="cuda")
        scale = 0.37
        kernel.launch(
            1,
            128,
            [
                *(_pointer(tensor) for tensor in (scores, out, lse)),
                *(ctypes.c_int(value) for value in (tiles, limit, diagonal)),
                ctypes.c_float(scale * 1.4426950408889634),
            ],
        )
        masked = scores.double() * scale
        columns, rows = torch.arange(128, device="cuda"), torch.arange(64, device="cuda")
        limits = torch.minimum(rows + 1, torch.tensor(limit, device="cuda")) if diagonal else rows * 0 + limit
        masked[0] = masked[0].masked_fill(columns >= limits[:, None], float("-inf"))
        joined = masked.transpose(0, 1).reshape(64, -1)
        wanted = joined.softmax(dim=1).view(64, tiles, 128).sum(dim=1)
        what = f"{tiles} tiles, limit {limit}{', diagonal' if diagonal else ''}"
        checks += [
            (what, relative_error(out, wanted), 4e-6),
            (f"{what}, LSE", relative_error(lse, joined.logsumexp(dim=1)), 1e-6),
        ]
    return checks


def _signal(kernel: Kernel) -> list[Check]:
    rounds = 50
    flags = torch.zeros(2, dtype=torch.int64, device="cuda")
    buffer = torch.zeros(16384, dtype=torch.uint8, device="cuda")
    sums = torch.zeros(rounds, dtype=torch.int32, device="cuda")
    kernel.launch(2, 128, [*(_pointer(tensor) for tensor in (flags, buffer, sums)), ctypes.c_int(rounds)])
    wanted = 4096 * 4097 // 2 * torch.arange(1, rounds + 1, device="cuda")
    return [(f"{rounds} rounds", relative_error(sums, wanted), 0.0)]
