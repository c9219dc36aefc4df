"""Stand-ins for the CUDA calls that ``megatron.core`` makes unconditionally, so that it runs without a GPU.

``install()`` does nothing where CUDA is available. Elsewhere it replaces, for the life of the process: the current
device, streams and synchronisation, the CUDA generator (by the CPU one), the device "cuda" in tensor factories (by
"cpu"), the type names that gradient clipping compares, and the split sizes of the expert exchange. Nothing in megatron
is edited; each stand-in says which of its calls it serves (megatron-core 0.19).
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_installed = False
_CPU = torch.device("cpu")


def install() -> bool:
    """Put the stand-ins in place; true when this process now runs on them, false when it has a GPU."""
    global _installed
    if torch.cuda.is_available():
        return False
    if not _installed:
        _installed = True
        _replace_device()
        _replace_streams()
        _replace_generator()
        _replace_type_names()
        _replace_split_sizes()
        _CudaMeansCpu().__enter__()
    return True


class _CudaMeansCpu(TorchFunctionMode):
    """``device="cuda"``, ``.cuda()`` and ``.to("cuda")`` stay on the CPU (schedules, optimizer, gradient scaling)."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0]
        if "device" in kwargs:
            kwargs = {**kwargs, "device": _on_cpu(kwargs["device"])}
        if func is torch.Tensor.to and len(args) > 1:
            args = (args[0], _on_cpu(args[1]), *args[2:])
        return func(*args, **kwargs)


def _on_cpu(device: Any) -> Any:
    named_cuda = isinstance(device, str) and device.startswith("cuda")
    return _CPU if named_cuda or (isinstance(device, torch.device) and device.type == "cuda") else device


class _Stream:
    """A stream and an event at once: on a CPU everything has happened when the call returns."""

    device = _CPU

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def wait(self, stream: Any = None) -> None: ...

    def record(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self, event: Any = None) -> _Stream:
        return event or self

    def query(self) -> bool:
        return True


def _replace_device() -> None:
    """Parameters and buffers are made on ``torch.cuda.current_device()``."""
    torch.cuda.current_device = lambda: _CPU
    torch.cuda.set_device = lambda device: None
    torch.cuda.synchronize = lambda device=None: None
    torch.cuda.empty_cache = lambda: None


def _replace_streams() -> None:
    """The expert dispatcher copies counts on a side stream, gradient reduction may have its own."""
    stream = _Stream()
    torch.cuda.Stream = torch.cuda.Event = _Stream
    torch.cuda.current_stream = torch.cuda.default_stream = lambda device=None: stream
    torch.cuda.stream = lambda stream: contextlib.nullcontext()
    torch.Tensor.record_stream = lambda tensor, stream: None


def _replace_generator() -> None:
    """The tracker of random states for model-parallel regions saves, seeds and restores the CUDA generator."""
    from megatron.core.tensor_parallel import random

    torch.cuda.get_rng_state = torch.cuda.random.get_rng_state = lambda device="cuda": torch.get_rng_state()
    torch.cuda.manual_seed = torch.manual_seed
    random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)


def _replace_type_names() -> None:
    """Gradient clipping asserts that gradients are of type ``torch.cuda.FloatTensor``."""
    original = torch.Tensor.type

    def type_name(tensor: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is not None:
            return original(tensor, dtype, *args, **kwargs)
        name = original(tensor)  # under the mode below, this comes back here
        return name if name.startswith("torch.cuda.") else name.replace("torch.", "torch.cuda.", 1)

    torch.Tensor.type = type_name


def _replace_split_sizes() -> None:
    """The dispatcher turns its split sizes into NumPy arrays only when they come from a GPU."""
    from megatron.core.transformer.moe import token_dispatcher

    original = token_dispatcher.maybe_move_tensor_to_cpu

    def to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        if as_numpy and isinstance(tensor, torch.Tensor):
            return tensor.numpy()
        return original(tensor, as_numpy, False)

    token_dispatcher.maybe_move_tensor_to_cpu = to_host
