"""Clock, power and temperature of a GPU at this moment, from the management library that comes with the driver."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache

import torch

_CLOCK_SM, _TEMPERATURE_GPU, _VERSION_BYTES = 1, 0, 80  # nvml.h


@dataclass(frozen=True)
class GpuState:
    """SM clock in MHz, power in W, temperature in degrees Celsius, and the bits of NVML's reasons for a lower clock."""

    sm_mhz: int
    power_w: float
    temperature_c: int
    throttle_bits: int


class NvmlError(RuntimeError):
    """The management library is missing or refused a call."""


def gpu_state(device: int) -> GpuState | None:
    """The state of torch's GPU number ``device``; None where the driver's library cannot tell."""
    try:
        handle = _handle(device)
        power = _unsigned("nvmlDeviceGetPowerUsage", handle)
        clock = _unsigned("nvmlDeviceGetClockInfo", handle, ctypes.c_int(_CLOCK_SM))
        temperature = _unsigned("nvmlDeviceGetTemperature", handle, ctypes.c_int(_TEMPERATURE_GPU))
        reasons = ctypes.c_ulonglong()
        _call("nvmlDeviceGetCurrentClocksThrottleReasons", handle, ctypes.byref(reasons))
    except NvmlError:
        return None
    return GpuState(clock, power / 1000, temperature, reasons.value)


def driver_version() -> str:
    """The driver's version, or why it cannot be told."""
    text = ctypes.create_string_buffer(_VERSION_BYTES)
    try:
        _call("nvmlSystemGetDriverVersion", text, ctypes.c_uint(_VERSION_BYTES))
    except NvmlError as error:
        return f"unknown: {error}"
    return text.value.decode()


@cache
def _library() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError as error:
        raise NvmlError(str(error)) from error
    if status := library.nvmlInit_v2():
        raise NvmlError(f"nvmlInit_v2 returned {status}")
    return library


@cache
def _handle(device: int) -> ctypes.c_void_p:
    # Not by index: CUDA_VISIBLE_DEVICES renumbers torch's devices, not the library's.
    name = f"GPU-{torch.cuda.get_device_properties(device).uuid}".encode()
    handle = ctypes.c_void_p()
    _call("nvmlDeviceGetHandleByUUID", ctypes.c_char_p(name), ctypes.byref(handle))
    return handle


def _unsigned(function: str, *arguments: object) -> int:
    value = ctypes.c_uint()
    _call(function, *arguments, ctypes.byref(value))
    return value.value


def _call(function: str, *arguments: object) -> None:
    if status := getattr(_library(), function)(*arguments):
        raise NvmlError(f"{function} returned {status}")
