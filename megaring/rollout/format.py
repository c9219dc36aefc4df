"""What must be equal on both sides of a switch for state to be reused as it is (SPLASH, section 4.1)."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class StateFormat:
    """How weights and cache are written down, in words that only have to be equal or not.

    Precisions are dtype names. Scales name a set of quantization scales, for example a digest of it, or ``none``.
    ``position_convention`` says how positions enter keys: the rotary form, its base and scaling, and where they start.
    """

    weight_precision: str = "bfloat16"
    kv_precision: str = "bfloat16"
    weight_scales: str = "none"
    kv_scales: str = "none"
    position_convention: str = "rotary, global from 0"


def check_reuse(source: StateFormat, destination: StateFormat) -> None:
    """Raise ValueError that names every field in which the formats differ."""
    differing = [
        f"{field.name} ({getattr(source, field.name)!r} here, {getattr(destination, field.name)!r} in the destination)"
        for field in fields(StateFormat)
        if getattr(source, field.name) != getattr(destination, field.name)
    ]
    if differing:
        raise ValueError(
            f"state cannot be reused across this switch: {'; '.join(differing)}. "
            "Serve both layouts in one format, or drain and rebuild the worker"
        )
