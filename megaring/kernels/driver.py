"""The CUDA driver as the kernels need it: load a cubin, describe a tensor to the copy engine, launch."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

import torch

from megaring.kernels.compile import build
from megaring.kernels.specialisations import Specialisation

TENSOR_MAP_BYTES = 128
BOX_COLUMNS = 64  # of 2 bytes: the 128 bytes that the swizzle spans
BOX_ROWS = 128  # of a tile of keys; tiles of queries have fewer in the backward


class DriverError(RuntimeError):
    """The CUDA driver refused a call; the message names the call and the driver's reason."""


@dataclass(frozen=True)
class Kernel:
    """A loaded kernel on one device."""

    specialisation: Specialisation
    function: object
    device: int

    def launch(self, blocks: int, threads: int, arguments: Sequence[ctypes._SimpleCData | ctypes.Array]) -> None:
        """Launch cooperatively on torch's current stream. ``arguments``: one ctypes object per kernel parameter."""
        driver = _driver()
        pointers = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(argument) for argument in arguments))
        stream = torch.cuda.current_stream(self.device).cuda_stream
        shared_bytes = self.specialisation.shared_bytes
        _checked(
            driver.cuLaunchCooperativeKernel(
                self.function, blocks, 1, 1, threads, 1, 1, shared_bytes, stream, ctypes.addressof(pointers)
            ),
            f"launch of {self.specialisation.label}",
        )


@cache
def load(specialisation: Specialisation, device: int, folder: Path | None = None) -> Kernel:
    """The kernel of ``specialisation`` on a device, compiled if need be. Raises CompileError or DriverError."""
    driver = _driver()
    built = build(specialisation, folder=folder)
    with torch.cuda.device(device):
        torch.cuda.current_stream()  # makes torch's context the current one
        module = _checked(driver.cuModuleLoadData(built.cubin), f"loading {specialisation.label}")
        name = specialisation.function.encode()
        function = _checked(driver.cuModuleGetFunction(module, name), f"finding {specialisation.function}")
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _checked(
            driver.cuFuncSetAttribute(function, attribute, specialisation.shared_bytes),
            f"raising the shared memory of {specialisation.label}",
        )
    return Kernel(specialisation, function, device)


def tensor_map(tensor: torch.Tensor, box_rows: int = BOX_ROWS) -> bytes:
    """128-byte description of a 16-bit tensor, ``[rows, heads, columns]`` or ``[rows, columns]``, for the copy engine.

    Boxes are 64 columns of one head by ``box_rows`` rows, 128-byte swizzled. Raises ValueError when the columns are not
    contiguous or a stride or the start is no multiple of 16 bytes.
    """
    if tensor.stride(-1) != 1:
        raise ValueError("the copy engine needs contiguous columns; call contiguous() on the tensor")
    return _tensor_map(tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()), box_rows)


@lru_cache(maxsize=4096)
def _tensor_map(
    pointer: int, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], box_rows: int
) -> bytes:
    driver = _driver()
    kinds = driver.CUtensorMapDataType
    kind = {
        torch.bfloat16: kinds.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        torch.float16: kinds.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
    }[dtype]
    # A dimension of one element is never stepped along, so its stride may be anything; the driver wants a sane one.
    bytes_apart = [2 * (strides[i] if shape[i] > 1 else math.prod(shape[i + 1 :])) for i in range(len(shape) - 1)]
    if pointer % 16 or any(step % 16 for step in bytes_apart):
        raise ValueError(
            f"the copy engine needs starts and strides in multiples of 16 bytes, not {pointer % 16} and {bytes_apart}"
        )
    integers, halves = driver.cuuint64_t, driver.cuuint32_t
    box = [BOX_COLUMNS, *[1] * (len(shape) - 2), box_rows]
    made = _checked(
        driver.cuTensorMapEncodeTiled(
            kind,
            len(shape),
            pointer,
            [integers(size) for size in reversed(shape)],
            [integers(step) for step in reversed(bytes_apart)],
            [halves(size) for size in box],
            [halves(1)] * len(shape),
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        ),
        f"describing a tensor of shape {shape} and strides {strides}",
    )
    return ctypes.string_at(made.getPtr(), TENSOR_MAP_BYTES)


def multiprocessors(device: int) -> int:
    """SM count of a device."""
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def _driver():
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise DriverError("cuda-bindings is missing; torch for CUDA depends on it") from error
    return driver


def _checked(result: tuple, what: str):
    status, *values = result
    if int(status) != 0:
        _, text = _driver().cuGetErrorString(status)
        reason = text.decode() if isinstance(text, bytes) else str(text)
        raise DriverError(f"{what} failed: {reason} ({status.name})")
    return values[0] if values else None
