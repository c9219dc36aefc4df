"""Training and RL on sequences of very different lengths: a Megatron-Core extension.

``attention(q, k, v, shards, ...)`` attends over whole sequences that are spread over the ranks of a domain;
``to_device(shards, device)`` makes the tensors that all layers of a microbatch share. Both are imported at first use,
so that ``import megaring`` costs nothing and needs no torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megaring.attention import attention
    from megaring.device_shards import DeviceShards, to_device

__all__ = ["DeviceShards", "attention", "to_device"]


def __getattr__(name: str) -> Any:
    if name == "attention":
        from megaring.attention import attention as value
    elif name in ("DeviceShards", "to_device"):
        from megaring import device_shards

        value = getattr(device_shards, name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
